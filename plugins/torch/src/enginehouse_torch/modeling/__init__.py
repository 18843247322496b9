"""Hugging Face causal language models under this project's token conventions, for engines that run them in torch."""
