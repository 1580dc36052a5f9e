//! Fuzzes the decoding of the first bytes on connections and streams: a value or an error.

use longhaul_transport::{BulkOpening, Hello, StreamHeader};

/// Decodes `data` as each kind of opening.
pub(crate) fn run(data: &[u8]) {
    if let Some((head, body)) = data.split_first_chunk() {
        let length = Hello::decode_head(head).unwrap_or(0);
        if let Some(body) = body.get(..length)
            && let Ok(hello) = Hello::decode_body(body)
        {
            let bytes = hello.encode();
            let read = Hello::decode_body(&bytes[10..]).expect("what was written can be read");
            assert_eq!(read.version_max, hello.version_max);
            assert!(hello.software.starts_with(&read.software));
        }
    }
    if let Ok(opening) = BulkOpening::decode(data) {
        assert_eq!(opening.encode(), data);
    }
    if let Ok(header) = StreamHeader::decode(data) {
        assert_eq!(header.encode(), data);
    }
}
