//! Fuzzes a migration stream: the first byte selects the pieces in which it arrives.

use longhaul_qemu_stream::{Event, Limits, ParseError, Parser};

const LIMITS: Limits = Limits {
    prelude_bytes: 4096,
    blocks: 8,
    block_bytes: 1 << 40,
    device_state_bytes: 65536,
};

/// Parses the stream whole and in pieces: the results must be equal.
pub(crate) fn run(data: &[u8]) {
    let Some((first, stream)) = data.split_first() else {
        return;
    };
    let whole = read(stream, stream.len().max(1));
    let pieces = read(stream, usize::from(*first).max(1));
    assert!(whole == pieces, "a stream in pieces says something else");
}

fn read(stream: &[u8], piece: usize) -> (Vec<Event>, Option<ParseError>) {
    let mut parser = Parser::new(LIMITS);
    let mut events = Vec::new();
    for mut input in stream.chunks(piece) {
        loop {
            match parser.next(&mut input) {
                Ok(Some(event)) => {
                    if let Event::Prelude(_) = event {
                        parser.keep(0);
                    }
                    events.push(event);
                }
                Ok(None) => break,
                Err(error) => return (events, Some(error)),
            }
        }
        assert!(input.is_empty(), "bytes are left without an event");
    }
    (events, None)
}
