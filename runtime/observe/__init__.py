"""What a run tells: logs and their checker, profiles, timelines, counts."""
