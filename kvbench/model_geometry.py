"""The geometry of a model's attention from its transformers configuration alone, before any weight is loaded."""

from typing import TYPE_CHECKING, Any

from kvbench.errors import ModelError
from kvbench.geometry import LayerGeometry, ModelGeometry

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# The layout of RoPE is in the model's code, not in its configuration. Calibration checks it against the model itself.
INTERLEAVED = frozenset(
    {"codegen", "cohere", "cohere2", "cohere2_moe", "ernie4_5", "ernie4_5_moe", "glm", "glm4", "gptj", "helium"}
)
# Models that rotate in their sliding-window layers only.
ROPE_IN_SLIDING_LAYERS_ONLY = frozenset({"cohere2", "cohere2_moe", "exaone4"})
# Models whose softmax has a learned sink; nothing in their configurations says so.
ATTENTION_SINKS = frozenset({"gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash"})
SERVED_LAYER_TYPES = ("full_attention", "sliding_attention")


def model_geometry(config: "PreTrainedConfig") -> ModelGeometry:
    """The attention geometry of the decoder that ``config`` describes.

    Raises ModelError with the reason when its attention cannot be served: multi-head latent attention, attention
    sinks, soft-capped logits, linear or chunked attention layers, encoder-decoders, models without RoPE.
    """
    name = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise _refusal(name, "it is an encoder-decoder; kvbench serves decoder-only models")
    text = config.get_text_config(decoder=True)
    _check_attention(name, text)
    count = text.num_hidden_layers
    layer_types = getattr(text, "layer_types", None) or [None] * count
    per_layer = _per_layer_configs(text, count)
    layers = tuple(_layer(name, per_layer[i], layer_types[i], i) for i in range(count))
    dtype = getattr(config, "dtype", None) or getattr(text, "dtype", None)
    return ModelGeometry(layers, str(dtype).removeprefix("torch.") if dtype is not None else "float32")


def _refusal(model_type: str, reason: str) -> ModelError:
    return ModelError(f"model type '{model_type}' cannot be served: {reason}.")


def _check_attention(name: str, text: Any) -> None:
    if getattr(text, "kv_lora_rank", None):
        raise _refusal(
            name,
            "its multi-head latent attention (MLA) caches a latent and one rotary key, not keys and values per head",
        )
    if name in ATTENTION_SINKS or text.model_type in ATTENTION_SINKS:
        raise _refusal(name, "its softmax has learned attention sinks, which the packed attention does not implement")
    if cap := getattr(text, "attn_logit_softcapping", None):
        raise _refusal(name, f"it soft-caps attention logits at {cap:g}, which the packed attention does not implement")
    unknown = sorted(set(getattr(text, "layer_types", None) or ()) - set(SERVED_LAYER_TYPES))
    if unknown:
        raise _refusal(
            name, f"it has layers of type {', '.join(unknown)}; allowed are {' and '.join(SERVED_LAYER_TYPES)}"
        )


def _per_layer_configs(text: Any, count: int) -> list[Any]:
    """One configuration a layer: heterogeneous models refuse to answer for all layers at once."""
    if getattr(text, "_heterogeneity_spec", None) is not None:
        return list(text.per_layer_config)
    return [text] * count


def _layer(name: str, config: Any, layer_type: str | None, index: int) -> LayerGeometry:
    q_heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or q_heads
    head_dim = _head_dim(config, layer_type)
    rotary_dim = _rotary_dim(name, config, layer_type, head_dim, index)
    if q_heads % kv_heads:
        raise _refusal(name, f"{q_heads} query heads cannot be shared evenly among {kv_heads} KV heads")
    if head_dim % 2 or rotary_dim % 2:
        raise _refusal(name, f"head_dim {head_dim} with rotary_dim {rotary_dim}; both must be even")
    return LayerGeometry(
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        interleaved=config.model_type in INTERLEAVED,
        sliding_window=_sliding_window(config, layer_type),
    )


def _head_dim(config: Any, layer_type: str | None) -> int:
    # The config's own field first: Mistral-Nemo has 128 where hidden_size / heads is 160.
    if layer_type == "full_attention" and getattr(config, "global_head_dim", None):
        return config.global_head_dim
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _rotary_dim(name: str, config: Any, layer_type: str | None, head_dim: int, index: int) -> int:
    rope = getattr(config, "rope_parameters", None) or {}
    if layer_type in rope:  # one set of parameters a layer type
        rope = rope[layer_type] or {}
    rotary_dim = getattr(config, "rotary_dim", None)
    if not rope and not rotary_dim:
        raise _refusal(name, "it has no rotary position embedding (RoPE)")
    without_rope = getattr(config, "no_rope_layers", None)  # 1 where the layer does rotate, despite the name
    if without_rope and not without_rope[index]:
        return 0
    has_windows = getattr(config, "sliding_window", None) is not None  # exaone4 without any rotates everywhere
    if config.model_type in ROPE_IN_SLIDING_LAYERS_ONLY and has_windows and layer_type == "full_attention":
        return 0
    if rotary_dim:
        return rotary_dim
    if rope.get("rope_type") == "proportional":  # all dims are paired; the slow pairs have frequency zero
        return head_dim
    factor = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    return int(head_dim * factor)


def _sliding_window(config: Any, layer_type: str | None) -> int | None:
    window = getattr(config, "sliding_window", None)
    if layer_type == "full_attention" or getattr(config, "use_sliding_window", True) is False:
        return None
    return window
