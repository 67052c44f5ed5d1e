"""Greedy decoding in training continues each row of positions as the engine does."""

import torch

from fusion.training.decoding import Prompt, greedy
from fusion.training.embedding import TextInput
from tests.families import VOCAB, build_model
from vlora.models.hf_model import HFModel, Positions

LIMIT = 6


def recomputed(hf_model: HFModel, prompt: Prompt) -> tuple[int, ...]:
    """Greedy tokens without a cache: each from a forward over the prompt and the tokens so far."""
    positions = Positions(prompt.positions.numpy())
    embeddings, tokens = prompt.input.embeddings, []
    for _ in range(LIMIT):
        rows = torch.from_numpy(positions.span(0, len(embeddings)))
        hidden = hf_model.text_model(inputs_embeds=embeddings[None], position_ids=rows[:, None]).last_hidden_state
        token = hf_model.lm_head(hidden[0, -1]).argmax()
        tokens.append(int(token))
        embeddings = torch.cat([embeddings, hf_model.embed(token[None])])
    return tuple(tokens)


@torch.no_grad()
def test_an_answer_continues_from_the_last_position_not_the_largest() -> None:
    model = build_model("qwen2_vl")
    hf_model = HFModel(model)
    model.set_attn_implementation({"text_config": "eager"})  # as `FrozenBase` trains
    generator = torch.Generator().manual_seed(0)
    prompts = []
    for length, longest in ((9, 3), (9, 40), (14, 25)):  # the time index of a video of so many frames
        embeddings = hf_model.embed(torch.randint(VOCAB, (length,), generator=generator))
        positions = torch.arange(length).repeat(3, 1)
        positions[0, 2:-3] = torch.linspace(2, longest, length - 5).long()
        prompts.append(Prompt(TextInput(embeddings, torch.zeros(length, dtype=torch.bool), (), None), positions))
    expected = [recomputed(hf_model, prompt) for prompt in prompts]
    assert len(set(expected)) == 3
    assert greedy(hf_model, prompts, LIMIT) == expected
