"""Models by the `config.json` of Hugging Face: sizes by family, or modules of transformers."""
