"""DeepSpeed ZeRO behind the engine interface."""
