"""Text to tokens and back: tokenizer, chat template, detokenizer, stop strings, output sections.

Plain Python over the `tokenizers` and `jinja2` libraries; imports neither torch nor transformers.
"""
