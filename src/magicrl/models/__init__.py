"""Hugging Face models for training and sampling: loading, packed attention, KV cache, decoding, fused head, kernels."""
