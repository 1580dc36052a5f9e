//! Fuzzes the bytes of a rendezvous connection over TCP: split into the same messages and relayed
//! datagrams however they arrive, or refused.

use longhaul_transport::{Received, TcpFrames, TcpFramesError, frame_header};

const MESSAGE_BYTES_MAX: usize = 1000;
const DATAGRAM_BYTES_MAX: usize = 100;

/// Takes `data` as a stream that arrives in pieces whose length is its first byte.
pub(crate) fn run(data: &[u8]) {
    let Some((step, stream)) = data.split_first() else {
        return;
    };
    let whole = split(stream, stream.len());
    let pieces = split(stream, usize::from(*step));
    assert_eq!(whole, pieces);
    let written: Vec<u8> = whole
        .0
        .iter()
        .flat_map(|frame| {
            let (content, is_datagram) = match frame {
                Received::Message(content) => (content, false),
                Received::Datagram(content) => (content, true),
            };
            [&frame_header(content.len(), is_datagram)[..], content].concat()
        })
        .collect();
    assert!(stream.starts_with(&written));
}

fn split(stream: &[u8], step: usize) -> (Vec<Received>, Option<TcpFramesError>) {
    let mut frames = TcpFrames::new(MESSAGE_BYTES_MAX, DATAGRAM_BYTES_MAX);
    let mut received = Vec::new();
    for piece in stream.chunks(step.max(1)) {
        frames.push(piece);
        loop {
            match frames.take() {
                Ok(Some(frame)) => received.push(frame),
                Ok(None) => break,
                Err(error) => return (received, Some(error)),
            }
        }
    }
    (received, None)
}
