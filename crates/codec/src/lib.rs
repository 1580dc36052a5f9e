//! How blocks are encoded: zero, same, reference or literal; frames of many blocks.
