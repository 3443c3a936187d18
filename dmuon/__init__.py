"""Muon for PyTorch on many ranks: every hidden matrix has one owner, the rest stays on FSDP2."""
