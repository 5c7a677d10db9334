"""What dedup and decontamination share: canonical text, guards, embedders, texts on disk."""
