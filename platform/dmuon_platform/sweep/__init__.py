"""``dmuon sweep``: one job many times, with other settings and seeds, and what came of it."""
