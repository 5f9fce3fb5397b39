"""The real weights, where they were fetched: `nestling models fetch NAME` first."""

import pytest
import torch

from nestling.engine.chat import Message, prompt_ids
from nestling.engine.checkpoint import load_model
from nestling.engine.model import KVCache, decode, extend, forward, logits
from nestling.families.open_models import fetched_folder, open_models, read_record
from nestling.inner.baselines import state_folder

TEXT = (
    "Paris is the capital of France, 1234  and\n\n\tthe café: naïve 日本. Once upon a time, there"
)


@pytest.mark.parity
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", sorted(open_models()))
def test_fetched_weights_give_the_logits_of_transformers(name: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = fetched_folder(state_folder(), name)
    if read_record(folder) is None:
        pytest.skip(f"{name} was not fetched; run: nestling models fetch {name}")
    model = load_model(folder)
    tokenizer = model.tokenizer
    messages = [Message(role="system", content="Be brief."), Message(role="user", content=TEXT)]
    prompt = prompt_ids(tokenizer, messages)
    library = AutoTokenizer.from_pretrained(folder)
    conversation = [{"role": m.role, "content": m.content} for m in messages]
    assert prompt == library.apply_chat_template(
        conversation, add_generation_prompt=True, return_dict=False
    )
    ids = torch.tensor([[prompt]])
    params = model.params()
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        theirs = peer(input_ids=ids[0]).logits[0]
        ours = logits(params, forward(params, model.config, ids).flatten(1, 2))[0]
    scale = theirs.abs().max()
    assert (ours - theirs).abs().max() < 1e-4 * scale
    cache = KVCache(model.config, 1, len(prompt) + 1)
    extend(
        params,
        model.config,
        ids[:, :, :-1],
        torch.zeros(1, 1, dtype=torch.long),
        cache,
        torch.zeros(1, dtype=torch.long),
    )
    last = torch.tensor([[len(prompt) - 1]])
    step = decode(params, model.config, ids[:, :, -1], last, cache, len(prompt))
    assert (step[0, 0] - theirs[-1]).abs().max() < 1e-4 * scale
