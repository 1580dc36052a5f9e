//! Fuzzes the decoding of messages: the result is a message that encodes to the same, or an error.

use longhaul_protocol::message::{Acknowledgement, ToDestination, ToSource};
use longhaul_protocol::piece::{Assembly, Piece};
use longhaul_protocol::replica::{FromReplica, ToReplica};
use longhaul_protocol::terminal::{FromTerminal, ToTerminal};
use longhaul_protocol::wire::{Message, decode, encode};
use std::fmt::Debug;

/// Decodes `data` as each kind of message, and as a piece of device state.
pub(crate) fn run(data: &[u8]) {
    check::<ToDestination>(data);
    check::<ToSource>(data);
    check::<Acknowledgement>(data);
    check::<ToReplica>(data);
    check::<FromReplica>(data);
    check::<ToTerminal>(data);
    check::<FromTerminal>(data);
    if let Ok(piece) = Piece::decode(data) {
        assert_eq!(piece.encode(), data);
        let mut assembly = Assembly::default();
        assembly.add(&piece).expect("the first piece fits");
        assert_eq!(
            assembly.whole().is_some(),
            piece.bytes.len() == piece.total as usize
        );
    }
}

fn check<M: Message + PartialEq + Debug>(data: &[u8]) {
    if let Ok(message) = decode::<M>(data) {
        let bytes = encode(&message).expect("what was accepted keeps to the limits");
        // The encoding may be shorter: numbers can be written with more bytes than necessary.
        assert!(bytes.len() <= data.len());
        assert_eq!(decode::<M>(&bytes).as_ref(), Ok(&message));
    }
}
