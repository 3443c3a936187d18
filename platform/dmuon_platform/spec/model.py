"""Section ``model``: what is trained."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from dmuon_platform.spec.problem import Problem
from dmuon_platform.spec.section import Section

# Every block is laid out, on each rank and in every plan, so a slip of the key would take minutes.
# A width beyond the second has matrices whose bytes no 64 bits count.
Layers = Annotated[int, Field(ge=1, le=1000)]
Width = Annotated[int, Field(ge=1, le=10**9)]
Heads = Annotated[int, Field(ge=1, le=10**5)]


class ModelSpec(Section):
    """The built-in Llama-style decoder by its sizes, or a model from a local folder."""

    name: Literal["llama"] = "llama"
    """The built-in architecture. Its weights and config open as ``LlamaForCausalLM``."""

    path: str | None = Field(None, min_length=1)
    """A local Hugging Face folder to train instead (needs the ``hf`` extra). Then no sizes."""

    vocab_size: Width = 256
    """Rows of the embedding; every token id must be below it. Byte tokens need 256."""

    hidden_size: Width = 256
    """Width of the residual stream; a multiple of twice the attention heads."""

    intermediate_size: Width = 704
    """Width of the feed-forward layer."""

    num_hidden_layers: Layers = 4
    """Decoder blocks, at most 1,000."""

    num_attention_heads: Heads = 4
    """Query heads."""

    num_key_value_heads: Heads | None = None
    """Key and value heads, a divisor of the query heads; none for as many as those."""

    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary frequencies."""

    rms_norm_eps: PositiveFloat = 1e-5
    """What RMSNorm adds to the mean square."""

    tie_word_embeddings: bool = False
    """Whether the head is the embedding."""

    initializer_range: NonNegativeFloat = 0.02
    """Standard deviation of all initial matrices."""

    def problems(self) -> Iterator[Problem]:
        """Yield sizes that do not go together."""
        if self.path is not None:
            yield from self._sizes_beside_a_path()
            return
        hidden, heads = self.hidden_size, self.num_attention_heads
        kv_heads = self.num_key_value_heads or heads
        if hidden % (2 * heads):
            yield Problem(
                "model.hidden_size",
                f"{hidden} must divide into {heads} attention heads of an even width",
                f"nearest good values: {either_multiple(hidden, 2 * heads)}",
                reads=("model.num_attention_heads",),
            )
        if heads % kv_heads:
            fitting = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            yield Problem(
                "model.num_key_value_heads",
                f"{kv_heads} must divide the {heads} attention heads",
                f"choose one of {fitting}",
                reads=("model.num_attention_heads",),
            )

    def _sizes_beside_a_path(self) -> Iterator[Problem]:
        for key, field in type(self).model_fields.items():
            if key != "path" and getattr(self, key) != field.default:
                yield Problem(
                    f"model.{key}",
                    f"has no meaning beside model.path = {self.path!r}, which brings its own",
                    f"remove model.{key}, or model.path",
                    reads=("model.path",),
                )


def either_multiple(value: int, unit: int) -> str:
    """Return the multiples of ``unit`` on both sides of ``value``, as ``"24 or 32"``."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)
