import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from nestling.core.errors import ModelError
from nestling.engine.tokenizer import CHAT_TEMPLATE, GLUE, PAD, TURN_END, TURN_START, Tokenizer

WORDS = [
    "ann", "bob", "cat", "(a)", " to ", ". ", "ANSWER: ", "add ",
    '<tool_call>\n{"name": "deposit", "arguments": {"account": "', '"}}\n</tool_call>', "é—",
]  # fmt: skip
CLOSED = Tokenizer.closed(WORDS)
MARKERS = [TURN_START, TURN_END, PAD, *GLUE, *WORDS]
TEXTS = st.lists(st.one_of(st.sampled_from(MARKERS), st.text())).map("".join)


@pytest.mark.long
@settings(max_examples=300)
@given(TEXTS)
def test_any_text_round_trips_exactly(text: str) -> None:
    expected = text.encode("utf-8", "replace").decode()
    assert CLOSED.decode(CLOSED.encode(text)) == expected
    assert CLOSED.decode(CLOSED.encode_markup(text)) == expected


@pytest.mark.long
@settings(max_examples=300)
@given(TEXTS)
def test_content_never_becomes_a_special_token(text: str) -> None:
    assert CLOSED.special_ids.isdisjoint(CLOSED.encode(text))


@pytest.mark.parametrize("marker", [TURN_START, TURN_END, PAD, *GLUE])
def test_a_marker_is_one_token_as_markup_and_plain_text_as_content(marker: str) -> None:
    assert len(CLOSED.encode_markup(marker)) == 1
    for text in (marker, f"ann{marker}bob", f" {marker} ", marker * 3):
        assert CLOSED.special_ids.isdisjoint(CLOSED.encode(text))


@pytest.mark.parametrize("word", WORDS)
def test_every_listed_string_is_one_token(word: str) -> None:
    assert len(CLOSED.encode(word)) == 1


def test_the_longest_string_wins_and_digits_and_letters_stay_apart() -> None:
    assert [CLOSED.decode([i]) for i in CLOSED.encode("(a)ann to bob. 17add")] == [
        "(a)", "ann", " to ", "bob", ". ", "1", "7", "a", "d", "d",
    ]  # fmt: skip


def test_all_ids_are_below_vocab_size_and_distinct() -> None:
    assert CLOSED.vocab_size == 256 + len(WORDS) + 3 + len(GLUE)
    assert (
        len({CLOSED.decode([i]) for i in range(256, CLOSED.vocab_size)}) == CLOSED.vocab_size - 256
    )
    assert CLOSED.turn_end_id != CLOSED.pad_id


def test_a_saved_folder_loads_to_the_same_tokenizer(tmp_path: Path) -> None:
    CLOSED.save(tmp_path)
    again = Tokenizer.load(tmp_path)
    text = f"{TURN_START}system\nann to bob é—{TURN_END}"
    assert again.encode(text) == CLOSED.encode(text)
    assert again.encode_markup(text) == CLOSED.encode_markup(text)
    assert (again.pad_id, again.turn_end_id, again.vocab_size) == (
        CLOSED.pad_id, CLOSED.turn_end_id, CLOSED.vocab_size,
    )  # fmt: skip
    assert (
        json.loads((tmp_path / "tokenizer_config.json").read_text())["chat_template"]
        == CHAT_TEMPLATE
    )


def test_the_callers_list_is_its_own() -> None:
    CLOSED.encode("ann").append(1)
    assert len(CLOSED.encode("ann")) == 1


@pytest.mark.parametrize("text", ["", "{}", "not json"])
def test_a_damaged_file_is_a_model_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_missing_file_and_missing_markers_are_model_errors(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot read"):
        Tokenizer.load(tmp_path)
    CLOSED.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text().replace(TURN_END, "<|fin|>"))
    with pytest.raises(ModelError, match="has no token"):
        Tokenizer.load(tmp_path)
    with pytest.raises(ModelError, match="only"):
        Tokenizer.closed(["x<|y"])


@pytest.mark.parity
def test_transformers_loads_the_folder_and_agrees(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    CLOSED.save(tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    text = "(a)ann to bob. 17 é—"
    assert theirs.encode(text, add_special_tokens=False) == CLOSED.encode(text)
    assert theirs.decode(CLOSED.encode(text), clean_up_tokenization_spaces=False) == text
    assert theirs.eos_token_id == CLOSED.turn_end_id
    assert theirs.pad_token_id == CLOSED.pad_id


@pytest.fixture(scope="module")
def hub_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A BPE as model hubs serve it: merges, GPT-2 splitting, markers inside the BPE vocabulary."""
    built = tokenizers.Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[PAD, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    built.train_from_iterator(["the tool said <|im_end|> and the turn went on"] * 20, trainer)
    folder = tmp_path_factory.mktemp("hub")
    built.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": {"content": PAD}}))
    return Tokenizer.load(folder)


@given(TEXTS)
def test_a_hub_tokenizer_keeps_the_same_wall(hub_tokenizer: Tokenizer, text: str) -> None:
    ids = hub_tokenizer.encode(text)
    assert hub_tokenizer.special_ids.isdisjoint(ids)
    assert hub_tokenizer.decode(ids) == text.encode("utf-8", "replace").decode()
    assert hub_tokenizer.encode_markup(TURN_END) == [hub_tokenizer.turn_end_id]
