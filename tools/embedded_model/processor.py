"""Tokenizer and image processor of the embedded model, in classes that transformers loads without torchvision.

Known words are one token; any other word is split into letters, so every word can be encoded.
"""

from __future__ import annotations

import string

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import LlavaProcessor, PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from fusion.embedded.drawing import BOARDS, COLORS, NUMBERS, PATTERNS, SIZE, THINGS, plural

PATCH = 16
CONTEXT = 1024
VOCAB_SIZE = 512
IMAGE_TOKEN = "<image>"
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>", IMAGE_TOKEN, "<user>", "<assistant>")

# Words of questions and answers besides the names in the world, including words that domains commonly use.
_WORDS = """
a an the what which who where when why how is are was were do does did can there here this that these it its they them
many much more most at in on of by to from with without into over under near behind beside between and or not no yes
nothing none any some all each both other same different than image picture photo photograph video frame frames camera
scene shown show shows see seen describe answer question name say tell count number digit letter word text color shape
size kind type class object objects thing things pattern position side left right up down top middle center bottom
move moves moving move stand stands still stay stays stop stops turn turns go goes drive drives driving cross crosses
crossing crash crashes happen happens happening wait waits walk walks walking run runs enter enters leave leaves pass
street road lane sign signs traffic light city building house tree grass gravel brick bricks wall sky water sun stars
day night dark bright small large big little long short high low wide tall near far fast slow new old full empty
face faces person people man woman child head hand animal cat dog bird horse flower coffee cup coin coins page paper
rocket moon retina cell astronaut motorcycle vehicle vehicles wheel wheels arrow bar yield entry speed limit parking
lot forward back backward away toward u action activity danger warning open closed on off gray grey black brown pink
first second third last next zero ten eleven twelve twenty thirty forty fifty sixty seventy eighty ninety hundred
apple ball bear boat book bottle box bridge chair clock door fire fish glass hat key knife lamp leaf machine map metal
mountain mouse phone plane plant plate river rock shoe snow spoon table train wood window defect damaged normal good
bad healthy sick ripe safe unsafe true false busy quiet direction nowhere you way motion far can lane lanes vehicle
"""

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<assistant>{% else %}<user>{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>{% endif %}{% endfor %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def vocabulary() -> dict[str, int]:
    """All tokens with ids: special tokens, characters at the start of and inside a word, then words."""
    characters = string.ascii_lowercase + string.digits + string.punctuation
    tokens = [*SPECIAL, *characters, *(f"##{character}" for character in string.ascii_lowercase + string.digits)]
    named = [*COLORS, *PATTERNS, *BOARDS, *NUMBERS, *THINGS, *(plural(thing) for thing in THINGS)]
    tokens += [word for word in (*named, *_WORDS.split()) if len(word) > 1]
    unique = dict.fromkeys(tokens)
    assert len(unique) <= VOCAB_SIZE, f"{len(unique)} words do not fit a vocabulary of {VOCAB_SIZE}"
    return {token: index for index, token in enumerate(unique)}


def build_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordPiece(vocabulary(), unk_token="<unk>", max_input_chars_per_word=64))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    # Words, and every other visible character on its own.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[a-zA-Z0-9]+|[^\sa-zA-Z0-9]"), "removed", invert=True)
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        extra_special_tokens={"image_token": IMAGE_TOKEN, "user_token": "<user>", "assistant_token": "<assistant>"},
        model_max_length=CONTEXT,
        padding_side="right",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def build_processor() -> LlavaProcessor:
    """Images are stretched to 96x96 and scaled to -1..1; each becomes 36 placeholder tokens."""
    side = {"height": SIZE, "width": SIZE}
    images = CLIPImageProcessorPil(
        size=side,
        crop_size=side,
        do_center_crop=False,
        do_convert_rgb=True,
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )
    return LlavaProcessor(
        image_processor=images,
        tokenizer=build_tokenizer(),
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHAT_TEMPLATE,
        image_token=IMAGE_TOKEN,
    )
