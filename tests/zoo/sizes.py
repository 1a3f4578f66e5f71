"""The figures of the zoo: what a config is told by the name of the field, and what single families need besides."""

from typing import Any

ABSENT: Any = type("Absent", (), {"__repr__": lambda _: "ABSENT", "__deepcopy__": lambda self, _: self})()
"""A field left to the config's own default."""

WIDTH, HEADS, KV_HEADS, HEAD, NEURONS, VOCABULARY, CONTEXT = 64, 4, 2, 24, 96, 128, 128
EXPERT, SHARED, EXPERTS, WINDOW = 48, 40, 6, 4

TOKENS = dict.fromkeys(
    "sep_token_id cls_token_id mask_token_id unk_token_id eod_token_id forced_eos_token_id".split(), 3
)
TOKENS |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}

PAIRS = ("layer_types", "mlp_layer_types")
TEXT = frozenset("text_config decoder llm_config language_config thinker_config qwen2_config qwen_config".split())
"""The fields that hold the config of a text tower."""


def _alike(size: int, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), size)


SIZES: dict[str, Any] = {
    **_alike(WIDTH, "hidden_size d_model n_embd dim embed_dim embedding_size"),
    **_alike(VOCABULARY, "vocab_size"),
    **_alike(4, "num_hidden_layers n_layer n_layers num_layers"),
    **_alike(3, "decoder_layers num_decoder_layers"),
    **_alike(1, "encoder_layers num_encoder_layers"),
    **_alike(HEADS, "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads"),
    **_alike(HEADS, "encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads"),
    **_alike(KV_HEADS, "num_key_value_heads"),
    **_alike(HEAD, "head_dim"),
    **_alike(NEURONS, "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner dff dim_ff ffn_hidden_size"),
    **_alike(NEURONS, "dense_intermediate_size intermediate_size_mlp prefix_dense_intermediate_size"),
    **_alike(EXPERT, "moe_intermediate_size expert_ffn_hidden_size"),
    **_alike(SHARED, "shared_expert_intermediate_size shared_experts_intermediate_size shared_intermediate_size"),
    **_alike(SHARED, "moe_shared_expert_intermediate_size"),
    **_alike(CONTEXT, "max_position_embeddings n_positions n_ctx max_seq_len original_max_position_embeddings"),
    **_alike(EXPERTS, "num_experts n_routed_experts num_local_experts moe_num_experts"),
    **_alike(2, "num_experts_per_tok moe_topk moe_k top_k_experts"),
    **_alike(1, "n_group topk_group num_expert_group num_limited_groups"),
    **_alike(1, "n_shared_experts num_shared_experts moe_num_shared_experts first_k_dense_replace num_dense_layers"),
    # latent attention and its index of keys
    "q_lora_rank": 20,
    "kv_lora_rank": 28,
    "o_lora_rank": 12,
    "o_groups": 2,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "qk_head_dim": 20,
    "v_head_dim": 16,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 4,
    **_alike(WINDOW, "sliding_window sliding_window_size window_size attention_chunk_size attention_window_size"),
    "local_attention": 8,
    "rotary_dim": 8,
    "d_rel": 4,
    "rel_extent": 16,
    "type_vocab_size": 2,
    # linear attention and state spaces
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 14,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
    "mamba_d_ssm": 128,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "state_size": 8,
    "ssm_state_size": 8,
    "chunk_size": 8,
}
"""A text tower's sizes by field name; no two that could be confused are equal."""

TOWER: dict[str, Any] = {
    **_alike(32, "hidden_size d_model embed_dim projection_dim"),
    **_alike(2, "num_hidden_layers depth num_layers encoder_layers num_attention_heads num_heads attention_heads"),
    **_alike(2, "encoder_attention_heads num_key_value_heads"),
    **_alike(48, "intermediate_size encoder_ffn_dim mlp_dim"),
    **_alike(WIDTH, "out_hidden_size output_dim vision_output_dim"),
    "image_size": 28,
    "patch_size": 14,
    "head_dim": 16,
}
"""The sizes of a tower for images or sound, which these tests never run."""

FAMILIES: dict[str, dict[str, Any]] = {}
"""What a family needs besides, or a variant ``family:variant`` of it."""


def _of(names: str, **sizes: Any) -> None:
    for name in names.split():
        FAMILIES.setdefault(name, {}).update(sizes)


def _layers(kinds: str, **more: Any) -> dict[str, Any]:
    """Layers by the first letters of their kinds."""
    names = {
        "s": "sliding_attention",
        "f": "full_attention",
        "l": "linear_attention",
        "i": "indexed_attention",
        "c": "chunked_attention",
        "v": "conv",
        "h": "hybrid",
        "w": "hybrid_sliding",
        "m": "minimax_m3_sparse",
    }
    return {"layer_types": [names[k] for k in kinds], "num_hidden_layers": len(kinds)} | more


def _mlps(kinds: str) -> dict[str, Any]:
    return {"mlp_layer_types": [{"d": "dense", "s": "sparse"}[k] for k in kinds]}


def _sections(*sections: int, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections), **more}


_CAP = {"final_logit_softcapping": 3.0}
_CAPS = {**_CAP, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": HEAD}
_SCALED = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3}

# ---- decoders made of encoders
_of("bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert", is_decoder=True)
_of("roberta roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod", is_decoder=True)
_of("xmod", default_language="en_XX")
_of("roc_bert", pronunciation_embed_dim=16, shape_embed_dim=16, pronunciation_vocab_size=20, shape_vocab_size=20)
_of("rembert", input_embedding_size=32, output_embedding_size=32)
_of("xlm", emb_dim=WIDTH, causal=True)
_of("reformer", is_decoder=True, axial_pos_shape=[4, 8], axial_pos_embds_dim=[32, 32], attention_head_size=16)
_of("reformer", local_attn_chunk_length=4, lsh_attn_chunk_length=4, num_hashes=1, hash_seed=0, num_buckets=4)
_of("reformer", feed_forward_size=NEURONS)
_of("xlnet", d_inner=NEURONS)
_of("prophetnet", ngram=1)

# ---- one layout or another of the same code
_of("openai-gpt", n_layer=3)
_of("gpt_neo", attention_types=[[["global", "local"], 2]])
_of("gpt2:scaled", scale_attn_by_inverse_layer_idx=True)
_of("mpt", attn_config={"attn_pdrop": 0, "alibi": True})
_of("bloom", n_head=HEADS)
_of("bloom:post_layernorm", apply_residual_connection_post_layernorm=True)
_of("opt", do_layer_norm_before=True, word_embed_proj_dim=32)
_of("opt:post_layernorm", do_layer_norm_before=False, word_embed_proj_dim=WIDTH)
_of("falcon", num_kv_heads=KV_HEADS, new_decoder_architecture=True)
_of("falcon:multi_query", multi_query=True, parallel_attn=True, new_decoder_architecture=False, num_kv_heads=ABSENT)
_of("falcon:sequential", multi_query=False, parallel_attn=False, new_decoder_architecture=False, num_kv_heads=ABSENT)
_of("falcon:sequential", alibi=True, bias=True)
_of("falcon:one_norm", num_ln_in_parallel_attn=1)
_of("gpt_neox", use_parallel_residual=True)
_of("gpt_neox:sequential", use_parallel_residual=False)
_of("gpt_bigcode", multi_query=True)
_of("gpt_bigcode:multi_head", multi_query=False)
_of("stablelm", qk_layernorm=True, partial_rotary_factor=0.5)
_of("stablelm:parallel", use_parallel_residual=True)
_of("phi", qk_layernorm=True, num_key_value_heads=KV_HEADS)
_of("phi:plain", qk_layernorm=False)
_of("persimmon", qk_layernorm=True)
_of("starcoder2", num_key_value_heads=KV_HEADS)
_of("olmo olmoe", clip_qkv=2.0)
_of("helium", head_dim=16)
_of("smollm3", no_rope_layers=[1, 1, 1, 0])
_of("qwen2 qwen3", use_sliding_window=True, max_window_layers=1, **_layers("fss"))
_of("ministral", **_layers("sfs"))
_of("cohere", use_qk_norm=True)
_of("cohere cohere2 cohere2_moe cohere_compass_text", logit_scale=0.5)
_of("cohere_compass_text", **_layers("sfs"))
_of("cohere_compass_text", rope_parameters=dict.fromkeys(("full_attention", "sliding_attention"), _sections(2, 1, 1)))
_of("granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared granite4_vision_text", **_SCALED)
_of("nanochat", **_CAP)
_of("dory", **_layers("sfsf"), n_input_layers=1, n_recurrent_layers=2, n_output_layers=1)

# ---- soft-caps and embeddings per layer
_of("gemma2 vaultgemma gemma3_text", **_CAPS)
_GEMMA_4 = {**_CAP, **_layers("sfsf"), "global_head_dim": 32, "num_key_value_heads": KV_HEADS, "head_dim": HEAD}
_PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY}
_of("gemma4_text", **_PER_LAYER, **_GEMMA_4, num_kv_shared_layers=2)
_of("gemma4_text:moe", num_kv_shared_layers=0, hidden_size_per_layer_input=0, enable_moe_block=True)
_of("gemma4_text:moe", num_experts=EXPERTS, top_k_experts=2, moe_intermediate_size=EXPERT)
_of("gemma4_text:moe", attention_k_eq_v=True, num_global_key_value_heads=1)
_of("gemma4_unified_text", **_GEMMA_4)
_of("gemma3n_text", **_layers("sfsf"), **_PER_LAYER, **_CAP, num_kv_shared_layers=2, laurel_rank=8)
_of("gemma3n_text", activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0])
_ASSISTED = {"num_kv_shared_layers": 4, "final_logit_softcapping": ABSENT}
_of("gemma4_assistant gemma4_unified_assistant", backbone_hidden_size=48, num_centroids=8)
_of("gemma4_assistant gemma4_unified_assistant", centroid_intermediate_top_k=2)
_of(
    "gemma4_assistant",
    text_config={
        **_ASSISTED,
        "model_type": "gemma4_text",
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
    },
)
_of("gemma4_unified_assistant", text_config={**_ASSISTED, "model_type": "gemma4_unified_text"})

# ---- latent attention
_of(
    "axk1 axk2 bailing_hybrid deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa", num_key_value_heads=HEADS
)
_of(
    "kimi_linear minicpm3 sarvam_mla youtu longcat_flash mistral4 dots3_note_text hy_v4 kimi_k2",
    num_key_value_heads=HEADS,
)
_of("axk1 axk2 bailing_hybrid deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa", head_dim=8)
_of("kimi_linear minicpm3 sarvam_mla youtu longcat_flash dots3_note_text hy_v4 kimi_k2", head_dim=8)
_of("mistral4 mistral_large4_text unlimited_ocr_text hy_v4_vl_text glm5_next_text", num_key_value_heads=HEADS)
_of("mistral4 unlimited_ocr_text", head_dim=ABSENT)
_of("hy_v4_vl_text", head_dim=8, rope_parameters=_sections(2, 1, 1))
_of("mistral4", qk_rope_head_dim=8, qk_head_dim=20)
_of("minicpm3 deepseek_v2", q_lora_rank=20)
_of("longcat_flash", qk_head_dim=20, num_layers=2, n_routed_experts=EXPERTS, zero_expert_num=2, moe_topk=2)
_of("hy_v4 glm_moe_dsa", indexer_types=["full", "shared", "full"])
_of("dots3_note_text", swa_num_attention_heads=2, swa_num_key_value_heads=2, swa_q_lora_rank=20, swa_kv_lora_rank=16)
_of("dots3_note_text", swa_head_dim=16, swa_qk_nope_head_dim=10, swa_v_head_dim=14, **_layers("issi"), **_mlps("dsss"))
_of("mistral_large4_text", **_layers("iiii"), **_mlps("dsss"), **_CAP, qk_nope_head_dim=12)
_of("mistral_large4_text", indexer_types=["full", "shared", "full", "full"], no_rope_layers=[1, 1, 1, 0])
_of("mistral_large4_text", kv_source_layers=[0, 1, 1, 3], rope_parameters={"rope_type": "default", "rope_theta": 1e4})

# ---- hybrid trunks
_of("lfm2 lfm2_moe", **_layers("vfvf"))
_of("mamba2", num_heads=8, head_dim=16)
_SHARED_BLOCK = ["linear_attention", "linear_attention", "hybrid", "linear_attention", "hybrid"]
_of("zamba zamba2", layers_block_type=_SHARED_BLOCK, num_hidden_layers=5, num_key_value_heads=HEADS)
_of("zamba2", mamba_ngroups=1, adapter_rank=8, use_shared_attention_adapter=True, use_mem_rope=True)
_of("zaya", num_experts_per_tok=1, router_hidden_size=16, **_layers("hwh"))
_of("bamba", attn_layer_indices=[1, 3], num_hidden_layers=4, mamba_d_head=16)
_of("granitemoehybrid", **_layers("lflf"), position_embedding_type="rope")
_of("jamba", attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=0)
_of("nemotron_h", layers_block_type=["linear_attention", "moe", "full_attention", "mlp"])
_of("recurrent_gemma", block_types=["recurrent", "attention"], lru_width=WIDTH)
_of("minimax", full_attn_alpha_factor=1.5, full_attn_beta_factor=0.7, linear_attn_alpha_factor=1.3)
_of("minimax", linear_attn_beta_factor=0.8, mlp_alpha_factor=1.2, mlp_beta_factor=0.6, block_size=4)
_of("falcon_h1", embedding_multiplier=3.0, lm_head_multiplier=0.5, key_multiplier=0.7, attention_out_multiplier=0.6)
_of("falcon_h1", attention_in_multiplier=0.9, ssm_in_multiplier=0.8, ssm_out_multiplier=0.5, mlp_multipliers=[0.7, 0.6])
_of("falcon_h1", ssm_multipliers=[0.9, 0.8, 0.7, 0.6, 1.1], mamba_d_head=16)
_of("inkling_text inkling2_text inkling2_loop_text", unpadded_vocab_size=120)
_of("inkling2_text", n_layers_per_attn_res_block=2, **_layers("whwh"))
_of("inkling2_loop_text", n_layers_per_attn_res_block=2, **_layers("whwhwh"), loop_layer_index_start=2)
_of("inkling2_loop_text", loop_layer_index_end=4, loop_num_passes=2, loop_gate_rank=8)
_of("inkling2 inkling2_loop inkling_mm_model", vision_config={"text_hidden_size": WIDTH})
_BYTES = {"vocab_size": 260, "max_position_embeddings": CONTEXT}
_LOCAL = {**_BYTES, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 48}
_of("blt", vocab_size=260, patch_in_forward=False, patch_size=4, patching_mode="static", local_attention_window_len=8)
_of("blt", encoder_hash_byte_group_size=[3], encoder_hash_byte_group_vocab=101, patcher_config=_LOCAL)
_of(
    "blt",
    encoder_config={**_LOCAL, "hidden_size_global": WIDTH},
    decoder_config={**_LOCAL, "hidden_size_global": WIDTH},
)
_of("blt", global_config={"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": 3, **_BYTES})

# ---- experts
_of("qwen3_moe", decoder_sparse_step=1)
_of("qwen2_moe qwen3_moe qwen3_next", mlp_only_layers=[0])
_of("granitemoeshared granitemoe_swa", shared_intermediate_size=SHARED)
_of("dbrx", attn_config={"attn_pdrop": 0.0, "clip_qkv": 8.0, "kv_n_heads": KV_HEADS, "rope_theta": 10000.0})
_of("dbrx", ffn_config={"hidden_size": WIDTH, "ffn_hidden_size": EXPERT, "moe_num_experts": EXPERTS, "moe_top_k": 2})
_of("mellum laguna", **_layers("fsf"), **_mlps("dss"))
_of("laguna", num_attention_heads_per_layer=[4, 4, 2], moe_router_logit_softcapping=5.0)
_of("minimax_m3_vl_text", **_layers("fmf"), **_mlps("dss"), index_block_size=2, index_topk_blocks=2, index_n_heads=2)
_of("glm4_moe sarvam_moe", use_qk_norm=True)
_of("cohere2_moe", **_layers("sfs"), **_mlps("dss"), num_shared_experts=1)
_of("llama4_text", **_layers("cccf"), interleave_moe_layer_step=2, no_rope_layers=[1, 1, 1, 0])
_of("doge", num_experts=16, is_moe=True, keep_window_size=8)
_of("doge:dense", is_moe=False)
_of("ernie4_5_vl_moe_text", moe_intermediate_size=[EXPERT, 32], rope_parameters=_sections(3, 3, 2))

# ---- several residual streams
_of("qwen4_exp_text", **_layers("lili"), indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=HEAD, indexer_budget=4)
_of("qwen4_exp_text", indexer_compress_ratio=2, hc_count=3, hc_lowrank=8, ple_layer_ids=[3], ple_embed_dim=32)
_of("qwen4_exp_text", heads_per_ngram=2, ngram_vocab_size_base=50, make_ngram_vocab_size_divisible_by=8)
_of("qwen4_exp_text", split_ngram_parts=2)
_of("glm5_next_text", **_layers("lili"), **_mlps("dsss"), qk_rope_head_dim=0, qk_nope_head_dim=20, head_dim=0)
_of("glm5_next_text", index_kpool=2, hc_mult=3)

# ---- text towers of models that also see or hear
_of("cosmos3_edge_text cosmos3_omni_text qwen2_5_omni_thinker_text qwen3_vl_text qwen3_vl_moe_text", head_dim=HEAD)
_of("cosmos3_edge_text cosmos3_omni_text qwen2_5_omni_thinker_text", rope_parameters=_sections(4, 4, 4))
_of("qwen3_vl_text qwen3_vl_moe_text qwen3_omni_moe_text video_llama_3", rope_parameters=_sections(4, 4, 4))
_of("qwen2_5_omni_text paddleocr_vl_text", rope_parameters=_sections(4, 4, 4), head_dim=HEAD)
_of("qwen2_vl_text qwen2_5_vl_text", rope_parameters=_sections(2, 3, 3), head_dim=ABSENT)
_of("glm4v_text", rope_parameters=_sections(2, 3, 3, partial_rotary_factor=1.0), head_dim=ABSENT)
_of("glm4v_moe_text glm_ocr_text glm46v_text glm_image_text", head_dim=HEAD)
_of(
    "glm4v_moe_text glm_ocr_text glm46v_text glm_image_text",
    rope_parameters=_sections(4, 4, 4, partial_rotary_factor=1.0),
)
_of("hunyuan_vl_text", head_dim=HEAD, rope_parameters=_sections(3, 3, 3, 3))
_of("muse_spark_text", **_CAP, moe_hidden_size=SHARED, head_dim=HEAD, output_multiplier=0.5)
_SOUND = {"num_hidden_layers": 4, "patch_sizes": (16, 6, 5, 4), "hidden_sizes": (8, 8, 8, 8), "depths": (1, 1, 1, 1)}
_of("muse_spark", out_hidden_size=WIDTH, projector_hidden_size=32, audio_config=_SOUND)
_of("nemotron_h_omni", projector_hidden_size=32, vision_hidden_size=32, vision_config={"video_temporal_patch_size": 2})
_ADAPTER = {"vision_feature_layer": [-1, 0], "hidden_size": 32, "text_hidden_size": WIDTH, "intermediate_size": 48}
_ADAPTER |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
_of("molmo2", vision_config={"image_size": [28, 28]}, adapter_config=_ADAPTER)
_of("molmo2_text", additional_vocab_size=8)
_of("granite4_vision", downsample_rate="1/2", deepstack_layer_map=[], spatial_target_layers=[])
_PROJECTOR = {"hidden_size": WIDTH, "num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": 1}
_of("fun_asr_nano", adaptor_config={**_PROJECTOR, "projector_hidden_size": 32})
_of("kyutai_speech_to_text", codebook_vocab_size=33, num_codebooks=2, audio_bos_token_id=32, audio_pad_token_id=194)
_of("kyutai_speech_to_text", ffn_dim=NEURONS)
_of("dots3_note", vision_config={"num_hidden_layers": ABSENT, "adapter_in_dim": 32, "adapter_out_dim": WIDTH})
_of("dots3_note", audio_config={"adapter_input_size": 32, "adapter_out_dim": WIDTH})
_of("chameleon", vocabulary_map={"<image>": 100, "IMGIMGA": 101})
_of("musicgen musicgen_melody", decoder={"num_codebooks": 2, "vocab_size": VOCABULARY})
_IMAGES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
_of("git", vision_config={**_IMAGES, "image_size": 28, "patch_size": 14})

# ---- towers that would be large
_of("chameleon apertus1p5", vq_config={"base_channels": 32, "num_embeddings": 64})
_of("janus", vq_config={"base_channels": 32, "num_embeddings": 64})
_of("apertus1p5", audio_config={"codebook_dim": 32, "codebook_size": 8}, image_token_offset=20, audio_token_offset=84)
_of("apertus1p5", vision_config={"base_channels": 32, "codebook_size": 64}, text_config={})
_of("nemo_speechlm", audio_config={"diarization_config": {"head_config": {"audio_hidden_size": 32}}})
_of("muse_glimmer", projector_hidden_size=32, out_hidden_size=WIDTH)
_of("granite_speech granite_speech_plus", encoder_config={"num_layers": 1, "hidden_dim": 32, "context_size": 8})
_SHALLOW = {"num_filters": 2, "depths": [1] * 7}
_of("vibevoice_asr", semantic_tokenizer_encoder_config=_SHALLOW, acoustic_tokenizer_encoder_config=_SHALLOW)
_of("kyutai_speech_to_text", codec_config={"upsample_groups": 32})
_of("deepseek_ocr2_text", num_hidden_layers=3, **_mlps("dss"))
_of("granite4_vision", vision_config={"hidden_size": WIDTH})

UNBUILT = {
    "gemma3n": "its vision tower needs the package timm; its text tower is the family gemma3n_text",
    "fast_vlm": "its vision tower needs the package timm",
    "perception_lm": "its vision tower needs the package timm",
    "inkling_mm_model": "its sound tower needs the package scipy; its text tower is the family inkling_text",
    "qwen2_5_omni": "a wrapper of several models, with no forward of its own",
    "qwen3_omni_moe": "a wrapper of several models, with no forward of its own",
}
"""Families that these tests do not build, and why."""
