"""What the model package reads of a job's ``model`` section."""

from typing import Protocol


class ModelSettings(Protocol):
    """The fields of ``spec.model``; names and meaning are those of a Llama ``config.json``."""

    @property
    def name(self) -> str:
        """Which built-in model; only ``"llama"`` today."""

    @property
    def path(self) -> str | None:
        """A local Hugging Face folder to train instead; all other fields are then unused."""

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding: every token id is below it."""

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""

    @property
    def intermediate_size(self) -> int:
        """Width of the feed-forward layer."""

    @property
    def num_hidden_layers(self) -> int:
        """Number of decoder blocks."""

    @property
    def num_attention_heads(self) -> int:
        """Number of query heads; divides ``hidden_size`` into heads of an even width."""

    @property
    def num_key_value_heads(self) -> int | None:
        """Number of key and value heads, a divisor of the query heads; None for as many."""

    @property
    def rope_theta(self) -> float:
        """Base of the rotary frequencies."""

    @property
    def rms_norm_eps(self) -> float:
        """What RMSNorm adds to the mean square."""

    @property
    def tie_word_embeddings(self) -> bool:
        """Whether the head is the embedding."""

    @property
    def initializer_range(self) -> float:
        """Standard deviation of all initial matrices."""
