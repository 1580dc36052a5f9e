//! What is checked of every message: an answer that can be sent again as it is, or an error.

use longhaul_protocol::message::{Acknowledgement, ToDestination, ToSource};
use longhaul_protocol::wire::{Message, decode, encode};
use std::fmt::Debug;

/// Decodes `data` as each kind of message.
pub(crate) fn run(data: &[u8]) {
    check::<ToDestination>(data);
    check::<ToSource>(data);
    check::<Acknowledgement>(data);
}

fn check<M: Message + PartialEq + Debug>(data: &[u8]) {
    if let Ok(message) = decode::<M>(data) {
        let bytes = encode(&message).expect("what was accepted keeps to the limits");
        // It may be shorter: numbers can be written with more bytes than they need.
        assert!(bytes.len() <= data.len());
        assert_eq!(decode::<M>(&bytes).as_ref(), Ok(&message));
    }
}
