"""The names of what a plan can be exported to. Light to import: the command line offers them before torch is loaded."""

MEGATRON = "megatron"
FOUR_OVER_SIX = "fouroversix"
TORCHAO = "torchao"
CHECKPOINT = "checkpoint"
"""A model with quantized weights. The others are files for a library, which `export_targets` describes."""
NAMES = (MEGATRON, FOUR_OVER_SIX, TORCHAO, CHECKPOINT)
