"""Configs of the model families: transformers' own classes, of 0.2 to 1.2 million parameters each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as hf

CONTEXT = 512
_WIDTH = 128
_DENSE: dict[str, Any] = {
    "hidden_size": _WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
}
_NO_HEAD_DIM = {name: value for name, value in _DENSE.items() if name != "head_dim"}
_HYBRID = {
    **_DENSE,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_GATED_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_ROUTED: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_QWEN_TOWER: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": _WIDTH,
}
_SIGLIP: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
_MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]}


def _qwen3_5_text(**more: Any) -> dict[str, Any]:
    rope = {**_MROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25, "mrope_interleaved": True}
    return {**_HYBRID, **_GATED_DELTA, "rope_parameters": rope, **more}


def _qwen_vl_text() -> dict[str, Any]:
    return {**_DENSE, "rope_parameters": {**_MROPE, "mrope_interleaved": True}}


def _latent(**more: Any) -> dict[str, Any]:
    return {
        **_NO_HEAD_DIM,
        "num_key_value_heads": 4,
        # vLLM's kernels for latent attention know the published sizes alone
        "kv_lora_rank": 512,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        **more,
    }


def _mamba2(prefix: str = "mamba_") -> dict[str, Any]:
    return {f"{prefix}n_heads": 4, f"{prefix}d_head": 64, f"{prefix}d_state": 8, f"{prefix}n_groups": 1}


def _gemma4(ids: dict[str, Any], **more: Any) -> Any:
    text = {
        **_DENSE,
        "num_hidden_layers": 4,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "global_head_dim": 32,
        "vocab_size_per_layer_input": ids["vocab_size"],
        **more,
        **ids,
    }
    tower = {**_SIGLIP, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 128}
    return hf.Gemma4Config(text_config=text, vision_config=tower)


def _granite4(ids: dict[str, Any], experts: int) -> Any:
    return hf.GraniteMoeHybridConfig(
        **{**_NO_HEAD_DIM, "num_hidden_layers": 3},
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_local_experts=experts,
        num_experts_per_tok=min(2, experts),
        shared_intermediate_size=64,
        **_mamba2(),
        **ids,
    )


CONFIGS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "Qwen 2": lambda ids: hf.Qwen2Config(**_NO_HEAD_DIM, **ids),
    "Qwen 3": lambda ids: hf.Qwen3Config(**_DENSE, tie_word_embeddings=True, **ids),
    "Qwen 3 MoE": lambda ids: hf.Qwen3MoeConfig(**_DENSE, **_EXPERTS, norm_topk_prob=True, **ids),
    "Qwen3-Next": lambda ids: hf.Qwen3NextConfig(
        **_HYBRID, **_GATED_DELTA, **_EXPERTS, shared_expert_intermediate_size=24, **ids
    ),
    "Qwen 3.5": lambda ids: hf.Qwen3_5Config(
        text_config=_qwen3_5_text(**ids), vision_config={**_QWEN_TOWER, "num_position_embeddings": 16}
    ),
    "Qwen 3.5 MoE": lambda ids: hf.Qwen3_5MoeConfig(
        text_config=_qwen3_5_text(**_EXPERTS, shared_expert_intermediate_size=24, **ids),
        vision_config={**_QWEN_TOWER, "num_position_embeddings": 16},
    ),
    "Qwen2.5-VL": lambda ids: hf.Qwen2_5_VLConfig(
        text_config={**_NO_HEAD_DIM, "rope_parameters": {**_MROPE, "mrope_section": [6, 5, 5]}, **ids},
        vision_config={**_QWEN_TOWER, "window_size": 16, "fullatt_block_indexes": [0]},
    ),
    "Qwen3-VL": lambda ids: hf.Qwen3VLConfig(
        text_config={**_qwen_vl_text(), **ids},
        vision_config={**_QWEN_TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    ),
    "Llama 3": lambda ids: hf.LlamaConfig(**_DENSE, **ids),
    "SmolLM 3": lambda ids: hf.SmolLM3Config(**_NO_HEAD_DIM, no_rope_layers=[1, 0], **ids),
    "SmolVLM": lambda ids: hf.SmolVLMConfig(
        text_config=hf.LlamaConfig(**_DENSE, **ids), vision_config=_SIGLIP, scale_factor=2
    ),
    "Phi 4 mini": lambda ids: hf.Phi3Config(**_NO_HEAD_DIM, partial_rotary_factor=0.5, **ids),
    "OLMo 3": lambda ids: hf.Olmo3Config(**_NO_HEAD_DIM, **_WINDOWS, **ids),
    "Gemma 3": lambda ids: hf.Gemma3Config(
        text_config={**_DENSE, **_WINDOWS, **ids}, vision_config=_SIGLIP, mm_tokens_per_image=4
    ),
    "Gemma 3 1B": lambda ids: hf.Gemma3TextConfig(**_DENSE, **_WINDOWS, **ids),
    "Gemma 4": lambda ids: _gemma4(ids, num_kv_shared_layers=2, hidden_size_per_layer_input=8),
    "Gemma 4 MoE": lambda ids: _gemma4(
        ids,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=24,
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=0,
    ),
    "Gemma 3n": lambda ids: hf.Gemma3nTextConfig(
        **{**_DENSE, "num_hidden_layers": 4, "intermediate_size": [64] * 4},
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        activation_sparsity_pattern=[0.0] * 4,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=ids["vocab_size"],
        altup_num_inputs=2,
        laurel_rank=4,
        **ids,
    ),
    "gpt-oss": lambda ids: hf.GptOssConfig(
        **_DENSE,
        **_WINDOWS,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={**_YARN, "truncate": False},
        **ids,
    ),
    "GLM 4": lambda ids: hf.Glm4Config(**_DENSE, **ids),
    "GLM 4.5 MoE": lambda ids: hf.Glm4MoeConfig(**_DENSE, **_ROUTED, **ids),
    # vLLM asks for what the published configs have beside what transformers reads
    "DeepSeek V3": lambda ids: hf.DeepseekV3Config(
        **_latent(), **_ROUTED, topk_method="noaux_tc", scoring_func="sigmoid", **ids
    ),
    "MiniMax M2": lambda ids: hf.MiniMaxM2Config(
        **_DENSE,
        num_local_experts=4,
        num_experts_per_tok=2,
        rotary_dim=16,
        scoring_func="sigmoid",
        use_routing_bias=True,
        **ids,
    ),
    "Granite 4": lambda ids: _granite4(ids, experts=0),
    "Granite 4 MoE": lambda ids: _granite4(ids, experts=4),
    "LFM2": lambda ids: hf.Lfm2Config(
        **{**_NO_HEAD_DIM, "num_hidden_layers": 3},
        layer_types=["conv", "full_attention", "conv"],
        block_multiple_of=16,
        block_dim=_WIDTH,
        conv_dim=_WIDTH,
        **ids,
    ),
    "Nemotron-H": lambda ids: hf.NemotronHConfig(
        **{**_DENSE, "num_hidden_layers": 4},
        layers_block_type=["linear_attention", "full_attention", "mlp", "moe"],
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=8,
        n_groups=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=24,
        **ids,
    ),
    "Ministral 3": lambda ids: hf.Mistral3Config(
        text_config=hf.Ministral3Config(
            **_DENSE,
            rope_parameters={
                **_YARN,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
            **ids,
        ),
        vision_config={**_SIGLIP, "head_dim": 8, "model_type": "pixtral"},
    ),
    "Falcon-H1": lambda ids: hf.FalconH1Config(**_DENSE, **_mamba2(), mamba_d_ssm=256, **ids),
    "DeepSeek V3.2": lambda ids: hf.DeepseekV32Config(**_latent(), **_ROUTED, **ids),
}
