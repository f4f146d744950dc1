"""Studies whose results the documents quote."""
