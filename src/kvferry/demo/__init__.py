"""The demonstration: tiny models, a real engine, and the proof that its blocks come back right."""
