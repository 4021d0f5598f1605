"""The interfaces of drafters: `Proposer` for decoding, `Drafter` for trained families."""
