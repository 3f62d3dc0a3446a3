"""Accelerators, links and topology as plain types; figures come from conf/accelerator."""
