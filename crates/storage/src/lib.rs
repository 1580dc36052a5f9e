//! What an agent keeps on disk: the journal of the hand-over.
