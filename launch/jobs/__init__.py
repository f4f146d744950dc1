"""Starts runs, watches over them and starts them again."""
