"""The parts of an inspection's page, kind by kind."""
