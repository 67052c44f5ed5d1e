"""Checks of a request before it is admitted, and the values that depend on the model and its adapter."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import msgspec

from vlora.config import EngineConfig
from vlora.engine.compositions import Compositions
from vlora.engine.grammar_cache import grammar_of
from vlora.engine.limits import Limits
from vlora.errors import AdapterChanged, BadRequest, PromptTooLong, UnknownHead
from vlora.lora.registry import AdapterRegistry, Registration
from vlora.models.families import encode_patches
from vlora.models.hf_model import HFModel
from vlora.models.vision.token_grids import why_no_grid
from vlora.orchestrator.scheduler import Scheduler
from vlora.types import ErrorValue, Request, RequestOutput, is_composed


class CheckedRequest(NamedTuple):
    """A request that can be served.

    Attributes:
        request: With the key of its adapter instead of a name, and all values that the runner needs.
        vision_key: The adapter that changes its images' features; None without one.
        num_holds: What it waits for: its grammar to be compiled, and its adapter's content to be read and checked.
    """

    request: Request
    vision_key: str | None
    num_holds: int


@dataclasses.dataclass(frozen=True)
class RequestChecks:
    """Checks requests against a model, its limits and the registered adapters."""

    config: EngineConfig
    hf_model: HFModel
    limits: Limits
    adapters: Compositions

    def check(self, request: Request) -> CheckedRequest:
        """Raises subclasses of BadRequest, or BadAdapter. Registers compositions, and changes no other state."""
        self._check_tokens(request)
        self._check_answered(request)
        adapter = self._adapter_of(request)
        start = self._first_adapted_token(request, adapter)
        is_checked = check_version(request, adapter, is_active=start is not None)
        # Without its invocation tokens an adapter is off, as in PEFT: the base model answers.
        key = adapter.key if adapter and start is not None else None
        checked = msgspec.structs.replace(
            request,
            adapter=key,
            max_ttft_s=self.config.max_ttft_s if request.max_ttft_s is None else request.max_ttft_s,
            read_from=0 if request.pooling == "mean" else self._first_image_token(request, adapter),
            adapter_from=start or 0,
            vision=tuple(
                msgspec.structs.replace(item, num_patches=encode_patches(self.hf_model.config, item))
                for item in request.vision
            ),
        )
        vision_key = key if adapter and adapter.header.touches_vision and request.vision else None
        return CheckedRequest(checked, vision_key, (not is_checked) + (grammar_of(request) is not None))

    def _check_tokens(self, request: Request) -> None:
        vocab = self.hf_model.embed.weight.shape[0]
        wrong = next((token for token in request.prompt_ids if not 0 <= token < vocab), None)
        if wrong is not None:
            raise BadRequest(f"the prompt contains token id {wrong}; this model's ids run from 0 to {vocab - 1}")
        biased = next((token for token, _ in request.sampling.logit_bias if not 0 <= token < vocab), None)
        if biased is not None:
            raise BadRequest(
                f"logit_bias has token id {biased}; this model's ids run from 0 to {vocab - 1}", field="logit_bias"
            )
        answer = 0 if request.in_one_pass else request.sampling.max_tokens
        if len(request.prompt_ids) + answer > self.limits.max_context:
            raise PromptTooLong(
                f"the prompt has {len(request.prompt_ids)} tokens and up to {answer} output tokens are requested, "
                f"over this model's context of {self.limits.max_context}; shorten the prompt or lower max_tokens"
            )
        for kind, token in (("image", self.hf_model.image_token_id), ("video", self.hf_model.video_token_id)):
            placed = request.prompt_ids.count(token) if token is not None else 0
            needed = sum(item.num_tokens for item in request.vision if item.kind == kind)
            if placed != needed:
                raise BadRequest(f"the prompt has {placed} {kind} placeholder tokens, but its {kind}s need {needed}")

    def _check_answered(self, request: Request) -> None:
        """Raises BadRequest if an answer with these tokens cannot continue."""
        answered = request.answered
        if not answered:
            return
        vocab, limit = self.hf_model.embed.weight.shape[0], request.sampling.max_tokens
        why = None
        if request.in_one_pass:
            what = "an embedding" if request.head is None else f"head {request.head!r}"
            why = f"{what} answers in one pass; omit the tokens"
        elif len(answered) >= limit:
            why = f"max_tokens is {limit}, so the answer is complete"
        elif (wrong := next((token for token in answered if not 0 <= token < vocab), None)) is not None:
            why = f"they contain token id {wrong}; this model's ids run from 0 to {vocab - 1}"
        elif not request.sampling.ignore_eos and not self.hf_model.eos_ids.isdisjoint(answered):
            place = next(i for i, token in enumerate(answered) if token in self.hf_model.eos_ids)
            why = f"the token at index {place} ends the answer"
        if why is not None:
            raise BadRequest(f"{len(answered)} answered tokens cannot be continued: {why}", field="answered")

    def _adapter_of(self, request: Request) -> Registration | None:
        if request.adapter is None:
            return None
        if request.head is not None and is_composed(request.adapter):
            raise UnknownHead(
                f"adapter {request.adapter!r} has no head {request.head!r}; it is a composition, and a head belongs to "
                "one adapter: name that one"
            )
        adapter = self.adapters.get(request.adapter, request.adapter_version)
        heads = adapter.header.heads
        if request.head is not None and request.head not in heads:
            raise UnknownHead(
                f"adapter {request.adapter!r} has no head {request.head!r}; its heads: "
                f"{', '.join(sorted(heads)) or 'none'}"
            )
        return adapter

    def _first_adapted_token(self, request: Request, adapter: Registration | None) -> int | None:
        """`AdapterHeader.first_token`. Raises BadRequest if a head's adapter would be off."""
        start = adapter.header.first_token(request.prompt_ids) if adapter else 0
        if adapter and start is None and request.head is not None:
            raise BadRequest(
                f"head {request.head!r} needs the invocation tokens of adapter {request.adapter!r} in the prompt: "
                f"{', '.join(map(str, adapter.header.invocation))}"
            )
        return start

    def _first_image_token(self, request: Request, adapter: Registration | None) -> int | None:
        """The index of the first token that a head over image tokens reads. Raises BadRequest if there is none."""
        if adapter is None or request.head is None or not adapter.header.heads[request.head].task.reads_images:
            return None
        name = f"head {request.head!r} of adapter {request.adapter!r}"
        reason = why_no_grid(self.hf_model.config)
        if reason is not None:
            raise BadRequest(f"{name} reads image tokens as a grid, and {reason}; use a head over the whole image")
        if not request.vision:
            raise BadRequest(f"{name} reads image tokens; the request has no image")
        placeholders = set(self.hf_model.placeholders.values())
        return next(index for index, token in enumerate(request.prompt_ids) if token in placeholders)


def check_version(request: Request, registration: Registration | None, *, is_active: bool = True) -> bool:
    """Check `Request.adapter_version`.

    Args:
        is_active: Whether the adapter applies to any of its tokens.

    Returns:
        Whether the content is right, or any is. False if the adapter was not read yet.

    Raises:
        AdapterChanged: The adapter has other content.
        BadRequest: The request has no adapter.
    """
    wanted = request.adapter_version
    if wanted is None:
        return True
    if registration is None:
        raise BadRequest(
            f"adapter_version is {wanted!r}, but the request has no adapter; set adapter, or omit adapter_version",
            field="adapter_version",
        )
    if is_active and registration.adapter is None:
        return False
    if is_active and registration.content.version == wanted:
        return True
    # The version of an adapter that is off is never returned (`AdapterVersions.version_of`).
    found = f"content {registration.content.version!r}" if is_active else "other invocation tokens"
    raise AdapterChanged(
        f"adapter {registration.name!r} has {found}, but the answer so far was computed with content {wanted!r}; send "
        "the request again without answered and adapter_version"
    )


@dataclasses.dataclass(eq=False)
class AdapterVersions:
    """Hooks that hold requests with an `adapter_version` until their adapter is read, and check its content then."""

    adapters: Compositions
    registry: AdapterRegistry
    scheduler: Scheduler

    def __post_init__(self) -> None:
        self._registrations: dict[str, Registration] = {}  # by request id, of active self.adapters
        self._unread: dict[str, Request] = {}

    def add(self, request: Request) -> None:
        if request.adapter is None:
            return
        registration = self.adapters.get(request.adapter, request.adapter_version)
        if registration.header.first_token(request.prompt_ids) is None:
            return  # the adapter is off
        self._registrations[request.request_id] = registration
        if request.adapter_version is not None and registration.adapter is None:
            self._unread[request.request_id] = request

    def version_of(self, request_id: str) -> str | None:
        """The content hash of an unfinished request's adapter; None if it is off, not read yet, or there is none."""
        registration = self._registrations.get(request_id)
        return None if registration is None or registration.adapter is None else registration.adapter.version

    def release_read(self) -> list[RequestOutput]:
        """Release requests with an adapter that was read; return the last outputs of those with a changed adapter."""
        outputs: list[RequestOutput] = []
        for request_id, request in tuple(self._unread.items()):
            registration = self._registrations[request_id]
            self.registry.fetch(registration.key)  # starts the read, or collects its result
            try:
                if not check_version(request, registration):
                    continue
            except AdapterChanged as error:
                output = self.scheduler.fail(request_id, ErrorValue.of(error))
                outputs += [] if output is None else [output]
            else:
                self.scheduler.release(request_id)
            del self._unread[request_id]
        return outputs

    def release(self, request_id: str) -> None:
        """Forget a request that has ended; unknown ids are ignored."""
        self._registrations.pop(request_id, None)
        self._unread.pop(request_id, None)
