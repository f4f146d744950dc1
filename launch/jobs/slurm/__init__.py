"""Runs and preparations as jobs of Slurm."""
