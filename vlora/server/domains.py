"""What the name in a request stands for, and whether a head or words answer the request.

A name is an adapter's own, or that of a domain that an adapter serves. Whether a head answers depends on the request's
form and on the domain, so that it is the same over RPyC, HTTP and commands.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from vlora.errors import BadRequest, listed
from vlora.server.prompts import TextRequest, as_prompt, text_of_question, visuals_of
from vlora.types import AdapterStatus, HeadSummary, SamplingParams, is_composed
from vlora.types.domain import DomainSummary, Way
from vlora.types.video import Video, VideoFile


class Target(NamedTuple):
    """The adapter that a name stands for.

    adapter: its own name, or that of a composition of such names. statuses: of the adapter, or of the composition's.
    domain: that was named; None for an adapter's own name that is not its domain's.
    """

    adapter: str
    statuses: tuple[AdapterStatus, ...]
    domain: DomainSummary | None = None

    @property
    def composed(self) -> bool:
        return is_composed(self.adapter)

    @property
    def questions(self) -> set[str]:
        """The questions of its domains, or that of the domain."""
        domains = [domain for status in self.statuses for domain in status.domains]
        return {domain.question for domain in ([self.domain] if self.domain is not None else domains)}


class Answering(NamedTuple):
    """domain: that the request asks about, if any. head: that answers; None for words."""

    domain: DomainSummary | None = None
    head: HeadSummary | None = None


def answering(target: Target | None, asked: TextRequest) -> Answering:
    """Which domain a request asks about, and by which way it is answered.

    The domain is the one that the request names. If it names an adapter, it is the adapter's only domain with this
    question, or its only one for a request without a question; questions are compared by their words. Its better way
    answers, or the one that the request chooses. A request that a head cannot serve is answered in words: another
    question, other images than the head reads, several turns, tools, several choices, or options of sampling.

    Raises BadRequest if the request chooses a head, and none can serve it.
    """
    visuals = visuals_of(asked.images)
    question, way = text_of_question(as_prompt(asked.prompt, visuals)), asked.answer
    domain = None if target is None else target.domain
    if target is not None and domain is None and not target.composed:
        domain = _asked_about(target.statuses[0], question, len(asked.images), way)
    if (way or (domain.answer if domain is not None else "words")) == "words":
        return Answering(domain)
    problem = next(_problems(target, domain, question, asked), None)
    if problem is None and way is None and domain is not None and not _same(question or "", domain.question):
        return Answering(domain)
    if problem is None:
        assert target is not None and domain is not None
        return Answering(domain, next(head for head in target.statuses[0].heads if head.name == domain.head))
    if way == "head":
        raise BadRequest(f"answer is 'head', but {problem}; leave out `answer`, or choose 'words'", field="answer")
    return Answering(domain)


def _asked_about(status: AdapterStatus, question: str | None, num_images: int, way: Way | None) -> DomainSummary | None:
    frames = {head.name: head.num_frames for head in status.heads}
    fitting = [each for each in status.domains if num_images and frames.get(each.head or "", num_images) == num_images]
    asked = [each for each in fitting if question is not None and _same(question, each.question)]
    if not asked and way == "head":
        asked = [each for each in fitting if each.head is not None]
    return asked[0] if len(asked) == 1 else None


def _same(question: str, other: str) -> bool:
    """Whether questions have the same words, in any case and with any spaces and punctuation. An empty one stands for
    the domain's own."""
    words = re.findall(r"\w+", question.casefold())
    return not words or words == re.findall(r"\w+", other.casefold())


def _problems(
    target: Target | None, domain: DomainSummary | None, question: str | None, asked: TextRequest
) -> Iterator[str]:
    """Why no head can serve a request."""
    if target is None:
        yield "the base model has no heads"
    elif target.composed:
        yield "a composition has no heads"
    elif domain is None:
        names = listed([each.name for each in target.statuses[0].domains if each.head is not None])
        yield f"adapter {target.adapter!r} has no single domain for this request; name one (with heads: {names})"
    elif domain.head is None:
        yield f"domain {domain.name!r} has no head"
    else:
        (num_frames,) = (head.num_frames for head in target.statuses[0].heads if head.name == domain.head)
        visuals = visuals_of(asked.images)
        if len(visuals) != num_frames or any(isinstance(visual, Video | VideoFile) for visual in visuals):
            yield f"head {domain.head!r} reads {num_frames} image{'s' * (num_frames != 1)} per request"
    if question is None:
        yield "a head answers one question about images, without other turns, a system message or tools"
    if asked.num_choices > 1:
        yield f"n is {asked.num_choices}, and a head has one answer"
    sampling = asked.sampling
    plain = msgspec.structs.replace(SamplingParams(max_tokens=sampling.max_tokens), seed=sampling.seed)
    for field in sampling.__struct_fields__:
        if getattr(sampling, field) != getattr(plain, field):
            yield f"{'response_format' if field == 'grammar' else field} applies to words only"
