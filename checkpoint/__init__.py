"""Reading a model's files without torch: geometry, tokenizer, chat template, digests, raw tensors.

The router uses the text half, workers the tensors; neither numpy nor gguf is imported before a
tensor is asked for. Start at `checkpoint.open.open_checkpoint`.
"""
