"""Request bodies of the API: every parameter that has an effect, its kind and its limits.

Three parameters of OpenAI's API are accepted and have no effect here, since nothing is stored and
nobody is tracked: `user`, `metadata`, `store`. Parameters we do not support are accepted with the
values that ask for nothing (`parse.NO_EFFECT`) and refused by name otherwise. `null` means absent.

Checking stops at what is wrong first (`fail_fast`, `Body`): a list of all that is wrong with a body of many
megabytes takes seconds, in which nobody else would be served.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from planning.fair_queue import MAX_PRIORITY, MIN_PRIORITY
from services.router.body import Body

MAX_CHOICES = 64
MAX_PROMPTS = 128
MAX_SEQUENCES = 512
MAX_STOPS = 16
MAX_STOP_CHARS = 512
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 4096
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
MAX_STRUCTURE_CHARS = 16384
MAX_STRUCTURE_CHOICES = 1024
MAX_STRUCTURE_CHOICE_CHARS = 512
MAX_SCHEMA_NAME_CHARS = 64
MAX_LOGPROBS = 20
MAX_SALT_CHARS = 512
INT64 = 2**63

Bias = Annotated[float, Field(ge=-100, le=100)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Stops = Annotated[list[Stop], Field(max_length=MAX_STOPS)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARS)]
StructureText = Annotated[str, Field(min_length=1, max_length=MAX_STRUCTURE_CHARS)]
StructureChoice = Annotated[str, Field(min_length=1, max_length=MAX_STRUCTURE_CHOICE_CHARS)]
Many = Field(min_length=1, max_length=MAX_PROMPTS)

# What a client may send where it differs from what a field holds; for the OpenAPI document.
PromptForms = (
    str
    | Annotated[list[int], Field(min_length=1)]
    | Annotated[list[str], Many]
    | Annotated[list[list[int]], Many]
)
StopForms = Stop | Stops
BiasForms = Annotated[dict[str, Bias], Field(max_length=MAX_LOGIT_BIAS)]


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _token_id_keys(value: Any) -> Any:
    """JSON object keys are strings; these are token ids."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_LOGIT_BIAS:
        raise PydanticCustomError("too_long", "should have at most {most} entries", {"most": MAX_LOGIT_BIAS})
    if not all(isinstance(key, str) and key.isascii() and key.isdigit() for key in value):
        raise PydanticCustomError("token_id_keys", "keys should be token ids")
    return {int(key[:20]): bias for key, bias in value.items()}


def _prompts(value: Any) -> list[str] | list[list[int]]:
    """From a string, strings, token ids or lists of token ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        kinds = set(map(type, value))
        if kinds == {int}:
            return [value]
        if len(value) > MAX_PROMPTS:
            raise PydanticCustomError("too_long", "should have at most {most} prompts", {"most": MAX_PROMPTS})
        if kinds == {str} or (kinds == {list} and all(set(map(type, ids)) <= {int} for ids in value)):
            return value
    raise PydanticCustomError(
        "prompt",
        "should be a string, a list of strings, a list of token ids or a list of such lists, not empty",
    )


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class JsonSchema(Body):
    """A schema and what OpenAI's API says about it; it holds whatever `strict` says."""

    name: Annotated[str, Field(max_length=MAX_SCHEMA_NAME_CHARS, pattern="^[a-zA-Z0-9_-]+$")]
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Body):
    """`json_schema` belongs to the type of that name, and to no other."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _fitting(self) -> ResponseFormat:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise PydanticCustomError(
                "json_schema", "json_schema should be there with type json_schema, and only with it"
            )
        return self


class StructuredOutputs(Body):
    """What the whole answer has to match: exactly one of these."""

    regex: StructureText | None = None
    choice: Annotated[list[StructureChoice], Field(min_length=1, max_length=MAX_STRUCTURE_CHOICES)] | None = (
        None
    )
    grammar: StructureText | None = None
    json_: Annotated[dict[str, Any] | None, Field(alias="json")] = None
    json_object: Literal[True] | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> StructuredOutputs:
        if len(self.model_fields_set) != 1:
            raise PydanticCustomError(
                "structured_outputs", "should have exactly one of regex, choice, grammar, json, json_object"
            )
        return self


class GenerationBody(Body):
    """What both endpoints share."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] = 0
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    logit_bias: Annotated[
        dict[int, Bias],
        Field(max_length=MAX_LOGIT_BIAS),
        BeforeValidator(_token_id_keys, json_schema_input_type=BiasForms),
    ] = {}
    stop: Annotated[Stops, BeforeValidator(_one_or_many, json_schema_input_type=StopForms)] = []
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS)] = []
    ignore_eos: bool = False
    allowed_token_ids: Annotated[list[int], Field(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)] | None = (
        None
    )
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS)] = []
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: Annotated[int, Field(ge=MIN_PRIORITY, le=MAX_PRIORITY)] = 0
    cache_salt: Annotated[str, Field(max_length=MAX_SALT_CHARS)] = ""
    return_token_ids: bool = False
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def has_format(self) -> bool:
        """Whether `response_format` asks for anything but text."""
        return self.response_format is not None and self.response_format.type != "text"

    @property
    def limit(self) -> int | None:
        """The client's bound on generated tokens of one choice."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def default_limit(self) -> int | None:
        """The bound when the client gives none; None = as many as fit."""
        return None

    @property
    def num_logprobs(self) -> int | None:
        """None = no log probabilities, k = the chosen token's and the k best."""
        raise NotImplementedError

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def prompt_param(self) -> str:
        return "prompt"

    @property
    def prompt_logprobs(self) -> bool:
        return False


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: Annotated[
        list[str] | list[list[int]], PlainValidator(_prompts, json_schema_input_type=PromptForms)
    ]
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def default_limit(self) -> int | None:
        return 16

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompts(self) -> int:
        return len(self.prompt)

    @property
    def prompt_logprobs(self) -> bool:
        return self.echo and self.logprobs is not None


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    """A turn. Content may be a string or text parts, which are joined by newlines."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] = ""

    def rendered(self) -> dict[str, str]:
        """What a chat template takes. `developer` is today's name of `system`."""
        text = self.content
        if not isinstance(text, str):
            text = "\n".join(part.text for part in text)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def prompt_param(self) -> str:
        return "messages"


class RoleBody(Body):
    """`POST /v1/cluster/workers/{id}/role`."""

    role: Literal["prefill", "decode"]


class TokenizeBody(Body):
    """`POST /tokenize`: a prompt as completions takes it, or messages as chat takes them."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool = True


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]
