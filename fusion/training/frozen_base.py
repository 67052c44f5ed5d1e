"""The base model that adapters are trained on: frozen weights, and samples encoded once, with their image features."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from PIL import Image

from atmm.formats import FORMATS
from atmm.quantized import BLOCK
from fusion.data.samples import Sample, Splits, held_back
from fusion.data.targets import answer_in_words
from fusion.embedded import checkpoint_path
from fusion.plan.schema import DomainPlan, Plan
from fusion.progress import Progress
from fusion.training.collator import (
    OFFSETS,
    EncodedSample,
    TextInput,
    batch_arguments,
    embed,
    features_of_tokens,
    invocation_tokens,
)
from fusion.training.features import FEATURES_FORMAT, FeatureCache, OnDisk
from fusion.training.fingerprint import hash_of_processing, hash_of_values, hash_of_weights
from fusion.training.objectives import objective_of
from heads.answer import Window
from vlora.config import EngineConfig, Quantize
from vlora.errors import BadConfig, BadPlan, BadRequest
from vlora.lora.peft_format import last_place
from vlora.models.hf_model import HFModel
from vlora.models.loading import load_model
from vlora.models.processing import EncodedPrompt, InputProcessor, to_tensor
from vlora.models.stored_quantized import language_linears
from vlora.models.vision.encoder import VisionEncoder, VisionTask
from vlora.models.vision.images import Region
from vlora.models.vision.token_grids import image_grids
from vlora.types import VisionInput

ENCODE_AT_ONCE = 16  # samples per batch and per progress update


class FrozenBase:
    """The base model without gradients: image features, prompts, and the language model that adapters modify.

    weights: their hash. invocation: the tokens at which adapters on it begin; empty for ordinary ones.

    Args:
        features: folder for image features; None keeps all of them in memory.
        train_vision: do not precompute image features, since training changes them.
    """

    def __init__(
        self,
        model: Any,
        processor: InputProcessor,
        *,
        features: Path | None = None,
        train_vision: bool = False,
        invocation: tuple[int, ...] = (),
        progress: Progress | None = None,
    ) -> None:
        self.processor = processor
        self.progress = progress or Progress()
        self.hf_model = HFModel(model)
        # Features come from `HFModel`, exactly as in serving; training uses the model's own attention. On a CPU the
        # fused attention takes 1.7 times as long per step, all of it in the backward pass (docs/decisions/0012).
        model.set_attn_implementation({"text_config": "eager" if self.hf_model.device.type == "cpu" else "sdpa"})
        self.model = model
        self.train_vision = train_vision
        self.invocation = invocation
        self.weights = hash_of_weights(model.named_parameters())
        self.features = None if features is None else FeatureCache(features, self._tower())
        self._vision = VisionEncoder(self.hf_model, cache_bytes=0)

    @torch.no_grad()
    def encode_samples(
        self,
        question: str,
        splits: Splits,
        samples: Sequence[Sample],
        on_encoded: Callable[[int], None] = lambda done: None,
    ) -> list[EncodedSample]:
        """Encode every sample's frames with its question, or the domain's."""
        encoded: list[EncodedSample] = []
        for first in range(0, len(samples), ENCODE_AT_ONCE):
            part = samples[first : first + ENCODE_AT_ONCE]
            prompts = [self.encode_prompt(question, sample) for sample in part]
            features = [None] * len(part) if self.train_vision else self._load_features(prompts)
            for sample, one, seen in zip(part, prompts, features, strict=True):
                ids = torch.tensor(one.prompt_ids)
                answer = self._answer_tokens(splits, sample)
                if len(ids) + len(answer) > self.hf_model.max_positions:
                    raise BadPlan(
                        f"{_file_of(sample)}: its pictures, question and answer take {len(ids) + len(answer)} tokens; "
                        f"the base model takes at most {self.hf_model.max_positions}"
                    )
                grids = [
                    (item.kind, {k: to_tensor(v) for k, v in item.fields.items() if "pixel" not in k})
                    for item in one.vision
                ]
                encoded.append(
                    EncodedSample(
                        ids,
                        seen,
                        tuple(one.vision) if seen is None else (),
                        image_grids(self.hf_model.config, one.vision),
                        torch.from_numpy(self.hf_model.positions(ids, grids).rows),
                        sample.target,
                        tuple(map(_window, one.shown)),
                        answer,
                        self._start_of_adapter(one, sample),
                    )
                )
            on_encoded(len(encoded))
        return encoded

    def encode_images(self, items: Sequence[VisionInput]) -> list[torch.Tensor]:
        """Features [image tokens, hidden * (1 + levels)] of each picture, with gradients if they are enabled."""
        return [features_of_tokens(one) for one in self._vision.encode([VisionTask(item, None) for item in items])]

    def features_of(self, samples: Sequence[EncodedSample]) -> list[torch.Tensor]:
        """Features of each sample [image tokens, hidden * (1 + levels)], computed now if the vision side is trained."""
        if not self.train_vision:
            return [seen for sample in samples if (seen := sample.embeddings) is not None]
        made = iter(self.encode_images([item for sample in samples for item in sample.vision]))
        return [torch.cat([next(made) for _ in sample.vision]) for sample in samples]

    @torch.no_grad()
    def decode_answers(self, samples: Sequence[EncodedSample], limit: int) -> list[str]:
        """Decode the current model's answer to each sample as the engine does, up to `limit` tokens."""
        rows = [
            embed(self.hf_model, one.ids, seen, one.start)
            for one, seen in zip(samples, self.features_of(samples), strict=True)
        ]
        prompts = [Prompt(row, one.positions) for row, one in zip(rows, samples, strict=True)]
        return [self.processor.decode(tokens).strip() for tokens in greedy(self.hf_model, prompts, limit)]

    def _load_features(self, encoded: Sequence[EncodedPrompt]) -> Sequence[torch.Tensor | OnDisk]:
        """Features of each sample's pictures, from the cache if they are stored."""
        items = [item for one in encoded for item in one.vision]
        if self.features is None:
            made = iter(self.encode_images(items))
            return [torch.cat([next(made) for _ in one.vision]) for one in encoded]
        samples = [[item.content_hash for item in one.vision] for one in encoded]
        return self.features.get(samples, lambda missing: self.encode_images([items[index] for index in missing]))

    def _tower(self) -> str:
        """Hash of all that features depend on but the picture: another device, or library, rounds differently."""
        made_by = {"weights": self.weights, "processing": hash_of_processing(self.processor)}
        libraries = {"torch": torch.__version__, "transformers": transformers.__version__}
        device = self.hf_model.device.type
        return hash_of_values({**made_by, **libraries, "device": device, "format": str(FEATURES_FORMAT)})

    def _answer_tokens(self, splits: Splits, sample: Sample) -> tuple[int, ...]:
        """Tokens of a sample's answer in words. Raises BadPlan if they include special tokens of the base model."""
        words = answer_in_words(splits, sample)
        if not words:
            return ()
        tokenizer = self.processor.tokenizer
        ids = tokenizer(words, add_special_tokens=False)["input_ids"]
        marks = {*tokenizer.all_special_ids, self.hf_model.image_token_id}
        if splits.labels:  # a head answers, which distinguishes labels outside the model's vocabulary
            marks.discard(tokenizer.unk_token_id)
        if found := sorted(marks.intersection(ids)):
            mark = tokenizer.convert_ids_to_tokens(found[0])
            raise BadPlan(
                f"{_file_of(sample)}: the answer {words!r} contains {mark}, a special token of the base model"
            )
        return (*ids, tokenizer.eos_token_id)

    def _start_of_adapter(self, prompt: EncodedPrompt, sample: Sample) -> int | None:
        """The index of the first token that an activated adapter applies to. Raises BadPlan if there is none."""
        if not self.invocation:
            return None
        start = last_place(prompt.prompt_ids, self.invocation)
        if start is None:
            text = self.processor.tokenizer.decode(list(self.invocation))
            raise BadPlan(
                f"{_file_of(sample)}: its prompt does not contain {text!r}, the invocation of activated adapters; "
                "change lora.invocation or the question"
            )
        return start

    def encode_prompt(self, question: str, sample: Sample) -> EncodedPrompt:
        """Encode a sample with its question or the domain's. Raises BadPlan for pictures that the processor refuses."""
        prompt = self.processor.chat(sample.question or question, len(sample.frames))
        try:
            return self.processor.encode(prompt, [Image.fromarray(frame) for frame in sample.frames])
        except BadRequest as error:
            raise BadPlan(f"{_file_of(sample)}: {error}") from error


def _file_of(sample: Sample) -> object:
    return getattr(sample.frames, "file", "a drawn picture")


def _window(shown: Region) -> Window:
    """The window of a picture that the image processor's centre crop keeps."""
    width, height = shown.width + 2 * shown.left, shown.height + 2 * shown.top
    return shown.left / width, shown.top / height, shown.width / width, shown.height / height


class Prompt(NamedTuple):
    """positions: [1 or 3, tokens]."""

    input: TextInput
    positions: torch.Tensor


@torch.no_grad()
def greedy(hf_model: HFModel, prompts: Sequence[Prompt], limit: int) -> list[tuple[int, ...]]:
    """Decode greedily until an end token, which is left out, or `limit` tokens."""
    # One length at a time needs no padding and no mask; a domain's prompts mostly have the same length.
    lengths: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompts):
        lengths.setdefault(len(prompt.input.embeddings), []).append(row)
    decoded: dict[int, tuple[int, ...]] = {}
    for rows in lengths.values():
        decoded.update(zip(rows, _decode_one_length(hf_model, [prompts[row] for row in rows], limit), strict=True))
    return [decoded[row] for row in range(len(prompts))]


def _decode_one_length(hf_model: HFModel, prompts: Sequence[Prompt], limit: int) -> list[tuple[int, ...]]:
    arguments = batch_arguments([prompt.input for prompt in prompts])
    places = torch.stack([prompt.positions for prompt in prompts], 1).to(hf_model.device)
    following = places[:, :, -1:] + 1  # as `Positions` of the engine; after an image this is not the number of tokens
    # Counted from the end, so an activated adapter applies to each later token too.
    offsets = {name: value for name, value in arguments.items() if name == OFFSETS}
    cache = None
    decoded: list[list[int]] = [[] for _ in prompts]
    active = set(range(len(prompts)))
    for _ in range(limit):
        output = hf_model.text_model(
            **arguments,
            position_ids=places if hf_model.family.mrope else places[0],
            past_key_values=cache,
            use_cache=True,
        )
        cache = output.past_key_values
        tokens = hf_model.lm_head(output.last_hidden_state[:, -1]).argmax(-1)
        for row, token in enumerate(tokens.tolist()):
            if token in hf_model.eos_ids:
                active.discard(row)
            elif row in active:
                decoded[row].append(token)
        if not active:
            break
        arguments = {"inputs_embeds": hf_model.embed(tokens)[:, None], **offsets}
        places = following
        following = following + 1
    return [tuple(tokens) for tokens in decoded]


def load_frozen_base(plan: Plan, device: str, progress: Progress, *, features: Path | None = None) -> FrozenBase:
    """Load the plan's base model. Raises BadConfig if a part of it is missing, BadPlan if adapters cannot begin."""
    path = checkpoint_path() if plan.base == "embedded" else plan.base
    processor = InputProcessor.from_pretrained(path)
    model = load_model(EngineConfig(model=path, device=device, dtype="float32"))
    round_base(model, plan.quantize)
    return FrozenBase(
        model,
        processor,
        features=features,
        train_vision=plan.lora.vision,
        invocation=invocation_tokens(plan.lora, processor),
        progress=progress,
    )


def round_base(model: Any, quantize: Quantize) -> None:
    """Round the weights that `vlora serve --quantize` rounds, in place and in their dtype, so that adapters are trained
    on them (QLoRA, arXiv:2305.14314). Raises BadConfig if the format cannot store a layer. Products round their inputs
    too when they are served; trainings do not."""
    if quantize == "none":
        return
    weight_format = FORMATS[quantize]
    with torch.no_grad():
        for name, linear in language_linears(model).items():
            if linear.in_features % weight_format.alignment:
                raise BadConfig(
                    f"quantize {quantize} needs layers with inputs in multiples of {weight_format.alignment}; "
                    f"{name} has {linear.in_features}; set another format"
                )
            for rows in linear.weight.split(max(1, BLOCK // linear.in_features)):
                rows.copy_(weight_format.decode(*weight_format.encode(rows)))


class Domain:
    """A domain's plan, its objective and its samples, each part encoded when it is first used.

    held_back: training samples that decide early stopping and calibrate heads with answers that depend on calibration.
    others: the remaining training samples, which share no group with them. Validation data is used for neither, so
    bounds computed on it are valid.

    Args:
        most: number of samples of each part to encode; all if None.
    """

    def __init__(self, plan: DomainPlan, splits: Splits, base: FrozenBase, *, most: int | None = None) -> None:
        self.plan = plan
        self.splits = splits
        self.base = base
        self.task = objective_of(splits, plan.metric)
        self._most = most

    @functools.cached_property
    def train(self) -> list[EncodedSample]:
        return self._encode("training", self.splits.train)

    @functools.cached_property
    def validation(self) -> list[EncodedSample]:
        return self._encode("validation", self.splits.validation)

    @functools.cached_property
    def test(self) -> list[EncodedSample]:
        return self._encode("test", self.splits.test)

    @functools.cached_property
    def held_back(self) -> list[EncodedSample]:
        return [self.train[index] for index in sorted(held_back(self.splits.train[: self._most]))]

    @functools.cached_property
    def others(self) -> list[EncodedSample]:
        kept = set(map(id, self.held_back))
        return [sample for sample in self.train if id(sample) not in kept]

    def encode(self) -> None:
        """Encode all parts now. Raises BadPlan for a sample that the base model cannot process."""
        _ = self.train, self.validation, self.test

    def _encode(self, part: str, samples: Sequence[Sample]) -> list[EncodedSample]:
        chosen = samples[: self._most]
        what = f"encoding the pictures of {self.plan.name}, {part}"
        with self.base.progress.work(what, len(chosen), "samples") as update:
            return self.base.encode_samples(self.plan.question, self.splits, chosen, update)

    def features(self) -> np.ndarray:
        """Mean image features of its training pictures, [d]: d columns for each image token. Not with `lora.vision`,
        where trainings change them."""
        means = [seen.float().mean(0) for sample in self.train if (seen := sample.embeddings) is not None]
        return torch.stack(means).mean(0).cpu().numpy()
