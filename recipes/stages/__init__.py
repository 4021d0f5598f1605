"""The stages of a run: their records, the run's folder and what each leaves out."""
