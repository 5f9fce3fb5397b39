from pathlib import Path

import pytest
import torch

pytest.importorskip("gguf")

from nestling.core.errors import ModelError
from nestling.engine.chat import Message, prompt_ids, render_call, tool_result_ids
from nestling.engine.checkpoint import load_model
from nestling.engine.gguf_folder import convert
from nestling.engine.tokenizer import Tokenizer
from nestling.engine.weights import Weights

from .conftest import GEMMA, make_config
from .gguf_files import TEXT, sentence_pieces, write_gemma, write_llama


def random_weights(**changes: object) -> Weights:
    generator = torch.Generator().manual_seed(3)
    weights = Weights.init(make_config(**changes), 1, generator)
    weights.flat.add_(torch.randn(weights.flat.shape, generator=generator) * 0.05)
    return weights


def test_a_llama_file_becomes_the_model_it_was_made_of(tmp_path: Path) -> None:
    weights = random_weights(vocab_size=300, intermediate_size=64)
    write_llama(tmp_path / "tiny.gguf", weights)
    convert(tmp_path / "tiny.gguf", tmp_path / "out")
    back = load_model(tmp_path / "out")
    assert back.config == weights.config
    # Q8_0 rounds to 1/127 of the largest of 32 numbers
    assert (back.weights.flat - weights.flat).abs().max() < weights.flat.abs().max() / 200
    norms = [name for name in weights.views() if name.endswith("norm")]
    ours, theirs = weights.views(), back.weights.views()
    assert all(torch.equal(ours[name], theirs[name]) for name in norms)


def test_a_gemma_file_becomes_the_model_it_was_made_of(tmp_path: Path) -> None:
    size = len(sentence_pieces()[0])
    gemma = {"query_scalar": 8, "window": 5, "local_rope_theta": 1e4, "global_layers": (5,)}
    weights = random_weights(**GEMMA | {"vocab_size": size, "num_layers": 6, "gemma": gemma})
    write_gemma(tmp_path / "tiny.gguf", weights)
    convert(tmp_path / "tiny.gguf", tmp_path / "out")
    back = load_model(tmp_path / "out")
    assert back.config == weights.config
    assert (back.weights.flat - weights.flat).abs().max() < 1e-6  # 1 was added and taken off again


@pytest.fixture(scope="module")
def gemma_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("gemma")
    size = len(sentence_pieces()[0])
    gemma = {"query_scalar": 8, "window": 5, "local_rope_theta": 1e4, "global_layers": ()}
    write_gemma(
        folder / "tiny.gguf", random_weights(**GEMMA | {"vocab_size": size, "gemma": gemma})
    )
    convert(folder / "tiny.gguf", folder / "out")
    return Tokenizer.load(folder / "out")


def test_sentence_pieces_merge_by_score_and_fall_back_to_bytes(gemma_tokenizer: Tokenizer) -> None:
    tokenizer = gemma_tokenizer
    pieces = sentence_pieces()[0]

    def spelled(text: str) -> list[str]:
        return [pieces[token] for token in tokenizer.encode(text)]

    assert spelled("ann") == ["ann"]
    assert spelled("ann ann") == ["ann", "▁ann"]
    assert spelled("a  n\n\nn") == ["a", "  ", "n", "\n\n", "n"]
    assert spelled("日") == ["<0xE6>", "<0x97>", "<0xA5>"]
    assert tokenizer.decode(tokenizer.encode(TEXT + "  \n\n\n x")) == TEXT + "  \n\n\n x"


@pytest.mark.parametrize("marker", ["<start_of_turn>", "<end_of_turn>", "<bos>"])
def test_content_that_spells_a_marker_of_gemma_stays_content(
    gemma_tokenizer: Tokenizer, marker: str
) -> None:
    assert gemma_tokenizer.layout.name == "gemma"
    assert len(gemma_tokenizer.encode_markup(marker)) == 1
    for text in (marker, f"ann{marker} ann", marker * 2):
        assert gemma_tokenizer.special_ids.isdisjoint(gemma_tokenizer.encode(text))
        assert gemma_tokenizer.decode(gemma_tokenizer.encode(text)) == text


SYSTEM, ASK = "you add up.", "ann has 12 apples"


def test_gemma_opens_with_the_system_in_the_users_turn(gemma_tokenizer: Tokenizer) -> None:
    messages = [Message(role="system", content=SYSTEM), Message(role="user", content=ASK)]
    text = gemma_tokenizer.decode(prompt_ids(gemma_tokenizer, messages))
    assert text == (
        f"<bos><start_of_turn>user\n{SYSTEM}\n\n{ASK}<end_of_turn>\n<start_of_turn>model\n"
    )
    alone = gemma_tokenizer.decode(prompt_ids(gemma_tokenizer, messages[1:]))
    assert alone == text.replace(f"{SYSTEM}\n\n", "")
    schema = {"type": "function", "function": {"name": "calc"}}
    shown = gemma_tokenizer.decode(prompt_ids(gemma_tokenizer, messages, [schema]))
    assert shown.startswith(f"<bos><start_of_turn>user\n{SYSTEM}\n\n# Tools\n")
    assert shown.endswith(f"</tool_call>\n\n{ASK}<end_of_turn>\n<start_of_turn>model\n")


def test_a_history_of_gemma_is_what_a_rollout_appends(gemma_tokenizer: Tokenizer) -> None:
    tokenizer = gemma_tokenizer
    opening = [Message(role="system", content=SYSTEM), Message(role="user", content=ASK)]
    call = render_call("calc", {"expression": "1+2"})
    whole = prompt_ids(
        tokenizer,
        [*opening, Message(role="assistant", content=call), Message(role="tool", content="3")],
    )
    appended = [
        *prompt_ids(tokenizer, opening),
        *tokenizer.encode(call),
        tokenizer.turn_end_id,
        *tool_result_ids(tokenizer, "3"),
    ]
    assert whole == appended
    assert tokenizer.decode(whole).endswith(
        "<start_of_turn>user\n<tool_response>\n3\n</tool_response><end_of_turn>\n"
        "<start_of_turn>model\n"
    )


@pytest.mark.parity
def test_transformers_builds_the_same_prompt_for_gemma(
    gemma_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    from transformers import PreTrainedTokenizerFast

    gemma_tokenizer.save(tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    turns = [("system", SYSTEM), ("user", ASK), ("assistant", "ann"), ("tool", "3")]
    ids = theirs.apply_chat_template(
        [{"role": role, "content": content} for role, content in turns],
        add_generation_prompt=True,
        return_dict=False,
    )
    messages = [Message(role=role, content=content) for role, content in turns]
    assert ids == prompt_ids(gemma_tokenizer, messages)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(ModelError, match=r"bad\.gguf"):
        convert(tmp_path / "bad.gguf", tmp_path / "out")


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "odd.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="mamba"):
        convert(tmp_path / "odd.gguf", tmp_path / "out")
