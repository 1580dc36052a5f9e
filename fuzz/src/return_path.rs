//! Fuzzes a return path: the first byte selects the pieces in which it arrives.

use longhaul_qemu_stream::return_path::{Message, Parser, ReturnPathError};

/// Parses the messages whole and in pieces: the results must be equal, and encode to the same
/// bytes.
pub(crate) fn run(data: &[u8]) {
    let Some((first, bytes)) = data.split_first() else {
        return;
    };
    let whole = read(bytes, bytes.len().max(1));
    let pieces = read(bytes, usize::from(*first).max(1));
    assert_eq!(whole, pieces, "a return path in pieces says something else");
    let mut again = Vec::new();
    whole.0.iter().for_each(|message| message.write(&mut again));
    assert!(
        bytes.starts_with(&again),
        "a message is not written as it was read"
    );
}

fn read(bytes: &[u8], piece: usize) -> (Vec<Message>, Option<ReturnPathError>) {
    let mut parser = Parser::new(4096);
    let mut messages = Vec::new();
    for mut input in bytes.chunks(piece) {
        loop {
            match parser.next(&mut input) {
                Ok(Some(message)) => messages.push(message),
                Ok(None) => break,
                Err(error) => return (messages, Some(error)),
            }
        }
    }
    (messages, None)
}
