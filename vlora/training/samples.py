"""From records to samples: files and text in a background thread, the vision tower in the engine's thread."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from vlora.errors import BadConfig, BadPlan, BadRequest
from vlora.models.hf_model import HFModel, VisionFeatures
from vlora.models.processing import InputProcessor, to_tensor
from vlora.models.vision.encoder import VisionEncoder, VisionTask
from vlora.models.vision.images import FORMATS, open_image, upright_rgb
from vlora.plan_files.errors import MAX_LISTED
from vlora.training.batch import IGNORED, Sample, check_sample
from vlora.training.records import Record
from vlora.types import VisionInput

if TYPE_CHECKING:
    from PIL import Image

log = logging.getLogger(__name__)

CACHE_BYTES = 64 << 20
CHECK_S = 10.0
"""Checkpoints of other trainings are not written meanwhile."""


class Prepared(NamedTuple):
    """A record without the features of its image. ids: prompt and answer. num_prompt: tokens of the prompt."""

    ids: tuple[int, ...]
    num_prompt: int
    vision: tuple[VisionInput, ...]


def prepare(processor: InputProcessor, record: Record) -> Prepared:
    """Read the image and tokenize. The answer ends with the end-of-text token, as the engine's answers do.

    Raises:
        BadRequest, BadImage: The record cannot be used; with its file and line.
    """
    try:
        images = [] if record.image is None else [read_picture(record.image)]
        prompt = processor.encode(_chat(processor, record), images)
        answer = processor.tokenizer(record.answer, add_special_tokens=False)["input_ids"]
    except BadRequest as error:
        raise type(error)(f"{record.place}: {error}") from error
    ids = (*prompt.prompt_ids, *answer, processor.tokenizer.eos_token_id)
    return Prepared(ids, len(prompt.prompt_ids), prompt.vision)


def _chat(processor: InputProcessor, record: Record) -> str:
    """The prompt before its image is processed. Raises BadRequest for markers in the text: they may mean the image."""
    num_images = int(record.image is not None)
    prompt = processor.chat(record.question, num_images)
    if (count := prompt.count(processor.image_token)) != num_images:
        raise BadRequest(f"its text has {count - num_images} image markers; remove them")
    return prompt


def check_records(processor: InputProcessor, max_positions: int, records: Iterable[Record]) -> None:
    """Find records that cannot be used, as far as it is seen without decoding pictures, which count as one token.

    The check ends after `CHECK_S`; later records are checked when they are used.

    Raises:
        BadPlan: With file, line and reason of each.
    """
    found: list[str] = []
    images: dict[Path, str] = {}
    until_s = time.monotonic() + CHECK_S
    for record in records:
        if time.monotonic() > until_s:
            log.info("%s: this record and later ones are checked when they are used", record.place)
            break
        if record.image is not None and record.image not in images:
            images[record.image] = _header_problem(record.image)
        problem = "" if record.image is None else images[record.image]
        if problem := problem or _text_problem(processor, max_positions, record):
            found.append(f"{record.place}: {problem}")
    if found:
        more = [f"and {len(found) - MAX_LISTED} more"] if len(found) > MAX_LISTED else []
        remedy = "mend these records, or set `bad_records: skip` to leave them out"
        raise BadPlan("\n".join([*found[:MAX_LISTED], *more, remedy]))


def _text_problem(processor: InputProcessor, max_positions: int, record: Record) -> str:
    """Why a record cannot be used, whatever its picture has; empty if it can."""
    try:
        texts = (_chat(processor, record), record.answer)
        num_tokens = 1 + sum(len(processor.tokenizer(one, add_special_tokens=False)["input_ids"]) for one in texts)
    except BadConfig:  # of the model's folder
        raise
    except Exception as error:  # of templates and tokenizers
        return str(error) if isinstance(error, BadRequest) else f"{type(error).__name__}: {error}"
    if num_tokens > max_positions:
        return f"it has {num_tokens} tokens; the model takes at most {max_positions}, so shorten it"
    return ""


def _header_problem(file: Path) -> str:
    """Why a picture cannot be used by its header; empty if it can."""
    try:
        with _opened(file):
            return ""
    except BadRequest as error:
        return str(error)


def finish(hf_model: HFModel, encoder: VisionEncoder, record: Record, prepared: Prepared) -> Sample:
    """Encode the image and build the sample. Raises BadRequest for one that does not fit the model."""
    ids = torch.tensor(prepared.ids)
    labels = ids.clone()
    labels[: prepared.num_prompt] = IGNORED
    items = [(item.kind, {k: to_tensor(v) for k, v in item.fields.items()}) for item in prepared.vision]
    visual: VisionFeatures | None = None
    with torch.inference_mode(False), torch.no_grad():
        positions = torch.from_numpy(hf_model.positions(ids, items).rows.copy())
        seen = encoder.encode([VisionTask(item, None) for item in prepared.vision])
        if seen:
            levels = zip(*(one.deepstack for one in seen), strict=True)
            visual = VisionFeatures(torch.cat([one.rows for one in seen]), tuple(map(torch.cat, levels)))
    sample = Sample(ids, labels, positions, visual)
    try:
        check_sample(hf_model, sample)
    except BadRequest as error:
        raise BadRequest(f"{record.place}: {error}") from error
    return sample


@dataclasses.dataclass(eq=False)
class SampleSource:
    """The samples of one training. Recent ones are kept, since records are used once per epoch.

    All calls come from the engine's thread.

    Attributes:
        load_processor: Called in the executor's thread, for every record.
        wake: Called from any thread when a record is prepared.
    """

    hf_model: HFModel
    encoder: VisionEncoder
    executor: Executor
    load_processor: Callable[[], InputProcessor]
    wake: Callable[[], None]
    _preparing: dict[Record, Future[Prepared]] = dataclasses.field(default_factory=dict, init=False)
    _samples: OrderedDict[Record, Sample] = dataclasses.field(default_factory=OrderedDict, init=False)
    _num_bytes: int = dataclasses.field(default=0, init=False)

    def request(self, records: Sequence[Record]) -> None:
        """Begin to prepare records. Those that are no longer wanted are forgotten."""
        wanted = dict.fromkeys(records)
        for record in [one for one in self._preparing if one not in wanted]:
            self._preparing.pop(record).cancel()
        for record in wanted:
            if record not in self._samples and record not in self._preparing:
                future = self.executor.submit(self._prepare, record)
                self._preparing[record] = future
                future.add_done_callback(lambda _: self.wake())

    def _prepare(self, record: Record) -> Prepared:
        return prepare(self.load_processor(), record)

    def is_prepared(self, record: Record) -> bool:
        return record in self._samples or self._preparing[record].done()

    def needs_encoding(self, record: Record) -> bool:
        """Whether `get` of a prepared record runs the vision tower. Raises as `get`."""
        return record not in self._samples and bool(self._preparing[record].result().vision)

    def get(self, record: Record) -> Sample:
        """The sample of a prepared record. Raises BadRequest or BadImage, with file and line."""
        sample = self._samples.get(record)
        if sample is None:
            sample = finish(self.hf_model, self.encoder, record, self._preparing[record].result())
            del self._preparing[record]
            self._samples[record] = sample
            self._num_bytes += _num_bytes(sample)
            while self._num_bytes > CACHE_BYTES and len(self._samples) > 1:
                self._num_bytes -= _num_bytes(self._samples.popitem(last=False)[1])
        self._samples.move_to_end(record)
        return sample

    def close(self) -> None:
        self.request(())
        self._samples.clear()


def read_picture(file: Path) -> Image.Image:
    with _opened(file) as image:
        return upright_rgb(image)


@contextmanager
def _opened(file: Path) -> Iterator[Image.Image]:
    """The picture of a file. Errors of the block are those of the picture. Raises BadRequest."""
    if not file.is_file():  # a pipe would block
        raise BadRequest(f"there is no file {file}")
    try:
        with open_image(file) as image:
            yield image
    except Exception as error:  # Pillow's readers raise many exception types on broken input
        raise BadRequest(f"{file} is not a valid picture ({', '.join(FORMATS)}): {error}") from error


def _num_bytes(sample: Sample) -> int:
    return sample.ids.nbytes * 4 + (0 if sample.visual is None else sample.visual.num_bytes)
