"""Grammar back ends: what an output may say next, by a library; nothing here needs torch."""
