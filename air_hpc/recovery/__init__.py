"""From evidence to verdict, and the stop agreement: pure functions, clock and events come in."""
