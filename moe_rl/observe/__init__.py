"""What a run leaves for people: metrics, samples, progress and a report. Imports no torch until events are written."""
