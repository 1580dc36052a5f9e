//! Fuzzes the input of the disk server from a client. The first byte selects the case: from the
//! handshake on, or from the first request on, and the kind of replies.

use longhaul_storage::disk::{Disk, Extent, Zeros};
use longhaul_storage::nbd::ExportName;
use longhaul_storage::nbd::connection::{HangUp, negotiate, transmit};
use longhaul_storage::nbd::handshake::{Offer, Session};
use std::io;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// The export that seeds request.
const NAME: &str = "00000000000000000000000000000000";
const SIZE: usize = 64 << 10;

/// Serves the client: the replies must follow the protocol, and requests to the disk must be within
/// it.
pub(crate) fn run(data: &[u8]) {
    let Some((how, mut data)) = data.split_first() else {
        return;
    };
    let disk = Memory(Mutex::new(vec![0; SIZE]));
    let mut said = Vec::new();
    let session = if how % 2 == 0 {
        let name = ExportName::new(NAME.to_owned()).expect("a name");
        let size_bytes = disk.size_bytes();
        let session = negotiate(&mut data, &mut said, &[Offer { name, size_bytes }]);
        let mut rest = &said[18..];
        while !rest.is_empty() {
            option_reply(&mut rest);
        }
        session.ok().flatten()
    } else {
        Some(Session {
            export: 0,
            structured: how & 2 != 0,
            allocation: how & 6 == 6,
        })
    };
    let Some(session) = session else { return };
    assert!(session.structured || !session.allocation);
    said.clear();
    let requests = data;
    // Whatever ends the connection, the replies before are complete.
    let never = HangUp {
        after: Duration::MAX,
        close: Box::new(|| ()),
    };
    let _ = transmit(&mut data, &mut said, &disk, session, &|_| (), never);
    check_replies(requests, &said, session);
}

fn take<'a>(bytes: &mut &'a [u8], length: usize) -> &'a [u8] {
    let (taken, rest) = bytes.split_at(length);
    *bytes = rest;
    taken
}

fn number(bytes: &mut &[u8], length: usize) -> u64 {
    let field = take(bytes, length).iter();
    field.fold(0, |number, byte| number << 8 | u64::from(*byte))
}

fn option_reply(bytes: &mut &[u8]) {
    assert_eq!(number(bytes, 8), 0x3_e889_0455_65a9);
    number(bytes, 8);
    let length = number(bytes, 4);
    assert!(length < 4096);
    take(bytes, length as usize);
}

/// Walks through requests and replies in parallel.
fn check_replies(mut requests: &[u8], mut said: &[u8], session: Session) {
    while !said.is_empty() {
        number(&mut requests, 6);
        let command = number(&mut requests, 2);
        let cookie = number(&mut requests, 8);
        let offset = number(&mut requests, 8);
        let length = number(&mut requests, 4);
        if command == 1 {
            take(&mut requests, length as usize);
        }
        let magic = number(&mut said, 4);
        if session.structured {
            assert_eq!(magic, 0x668e_33ef);
            assert_eq!(number(&mut said, 2), 1, "not the last part");
            let kind = number(&mut said, 2);
            assert_eq!(number(&mut said, 8), cookie);
            let payload = number(&mut said, 4);
            let mut payload = take(&mut said, payload as usize);
            match kind {
                0 => assert!(payload.is_empty() && (command != 0 || length == 0)),
                1 => {
                    assert_eq!(command, 0);
                    assert_eq!(number(&mut payload, 8), offset);
                    assert_eq!(payload.len() as u64, length);
                }
                5 => check_extents(&mut payload, command, length),
                0x8001 => {
                    assert_ne!(number(&mut payload, 4), 0);
                    assert_eq!(number(&mut payload, 2), payload.len() as u64);
                }
                other => panic!("a part of kind {other}"),
            }
        } else {
            assert_eq!(magic, 0x6744_6698);
            let error = number(&mut said, 4);
            assert_eq!(number(&mut said, 8), cookie);
            if command == 0 && error == 0 {
                take(&mut said, length as usize);
            }
        }
    }
}

fn check_extents(payload: &mut &[u8], command: u64, length: u64) {
    assert_eq!(command, 7);
    assert_eq!(number(payload, 4), 1);
    let mut sum = 0;
    assert!(!payload.is_empty());
    while !payload.is_empty() {
        let extent = number(payload, 4);
        assert_ne!(extent, 0);
        sum += extent;
        assert!([0, 3].contains(&number(payload, 4)));
    }
    assert!(sum <= length);
}

#[derive(Debug)]
struct Memory(Mutex<Vec<u8>>);

impl Memory {
    fn with<T>(&self, range: Range<u64>, run: impl FnOnce(&mut [u8]) -> T) -> T {
        let mut bytes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        run(&mut bytes[range.start as usize..range.end as usize])
    }
}

impl Disk for Memory {
    fn size_bytes(&self) -> u64 {
        SIZE as u64
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let range = offset..offset + buffer.len() as u64;
        self.with(range, |bytes| buffer.copy_from_slice(bytes));
        Ok(())
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        // A disk with an unreadable block.
        if bytes.first() == Some(&0xbd) {
            return Err(io::ErrorKind::Other.into());
        }
        let range = offset..offset + bytes.len() as u64;
        self.with(range, |here| here.copy_from_slice(bytes));
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn zero(&self, range: Range<u64>, _zeros: Zeros) -> io::Result<()> {
        self.with(range, |bytes| bytes.fill(0));
        Ok(())
    }

    fn discard(&self, range: Range<u64>) -> io::Result<()> {
        self.zero(range, Zeros::MayBeHole)
    }

    fn extents(&self, range: Range<u64>, count_max: usize) -> io::Result<Vec<Extent>> {
        let blocks = self.with(range, |bytes| {
            let block = |block: &[u8]| Extent {
                length_bytes: block.len() as u64,
                hole: block.iter().all(|byte| *byte == 0),
            };
            bytes.chunks(512).map(block).take(count_max).collect()
        });
        Ok(blocks)
    }
}
