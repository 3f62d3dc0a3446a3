"""From overrides to a submitted job: script, sweep, code snapshot, submission."""
