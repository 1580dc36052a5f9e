//! Frames of libvirt's RPC protocol (`virnetprotocol.x`).
//!
//! ```text
//! length  u32, of the whole frame
//! program u32, version u32, procedure i32, type u32, serial u32, status u32
//! payload, in XDR
//! ```

use crate::xdr::{Reader, Writer, XdrError};
use std::io::{self, Read};

/// The maximum length of a frame: `VIR_NET_MESSAGE_MAX` with its length.
pub const FRAME_BYTES_MAX: usize = (32 << 20) + 4;
/// The length of a frame without a payload.
const EMPTY_BYTES: usize = 28;
/// The version of every program.
const VERSION: u32 = 1;

/// The program for everything that all hypervisors have.
pub const REMOTE: u32 = 0x2000_8086;
/// The program for what only QEMU has.
pub const QEMU: u32 = 0x2000_8087;

/// The type of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A call, with arguments.
    Call,
    /// Its answer.
    Reply,
    /// An event.
    Event,
    /// Data of a stream.
    Stream,
    /// A call with descriptors.
    CallWithFds,
    /// An answer with descriptors.
    ReplyWithFds,
}

const KINDS: [Kind; 6] = [
    Kind::Call,
    Kind::Reply,
    Kind::Event,
    Kind::Stream,
    Kind::CallWithFds,
    Kind::ReplyWithFds,
];

/// The status of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// The payload is the result.
    Ok,
    /// The payload is an error.
    Error,
    /// More of a stream follows.
    Continue,
}

const STATUSES: [Status; 3] = [Status::Ok, Status::Error, Status::Continue];

/// The header of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// The program.
    pub program: u32,
    /// The procedure of the program.
    pub procedure: i32,
    /// The type.
    pub kind: Kind,
    /// The number of a call, and of its answer; 0 for events.
    pub serial: u32,
    /// The status.
    pub status: Status,
}

/// A message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// The header.
    pub header: Header,
    /// Arguments, a result, or an error.
    pub payload: Vec<u8>,
}

impl Message {
    /// Returns the frame of the message.
    pub fn frame(&self) -> Vec<u8> {
        let Header {
            program,
            procedure,
            kind,
            serial,
            status,
        } = self.header;
        let length = EMPTY_BYTES + self.payload.len();
        let mut writer = Writer::default();
        // A longer frame is refused by every daemon, as a shorter one is here.
        writer.u32(u32::try_from(length).unwrap_or(u32::MAX));
        writer.u32(program).u32(VERSION).i32(procedure);
        writer.u32(kind as u32).u32(serial).u32(status as u32);
        let mut frame = writer.into_bytes();
        frame.extend(&self.payload);
        frame
    }

    /// Reads a frame; `None` at the end of the input.
    ///
    /// # Errors
    /// When the input ends within a frame, or is no frame.
    pub fn read(input: &mut impl Read) -> io::Result<Option<Self>> {
        let mut length = [0; 4];
        // The first byte alone tells the end of the input from an end within a frame.
        if input.read(&mut length[..1])? == 0 {
            return Ok(None);
        }
        input.read_exact(&mut length[1..])?;
        let length = u32::from_be_bytes(length) as usize;
        if !(EMPTY_BYTES..=FRAME_BYTES_MAX).contains(&length) {
            let text = format!("a message of {length} bytes, which none has");
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        let mut rest = Vec::new();
        let wanted = length as u64 - 4;
        // The memory grows with what arrives.
        if input.take(wanted).read_to_end(&mut rest)? as u64 != wanted {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let payload = rest.split_off(EMPTY_BYTES - 4);
        let header = header(&rest).map_err(|error| {
            let text = format!("a message whose header is not understood: {error}");
            io::Error::new(io::ErrorKind::InvalidData, text)
        })?;
        Ok(Some(Self { header, payload }))
    }
}

fn header(bytes: &[u8]) -> Result<Header, XdrError> {
    let mut reader = Reader::new(bytes);
    let program = reader.u32()?;
    let version = reader.u32()?;
    if version != VERSION {
        return Err(XdrError::Number(version));
    }
    let procedure = reader.i32()?;
    let kind = reader.u32()?;
    let kind = KINDS.get(kind as usize).ok_or(XdrError::Number(kind))?;
    let serial = reader.u32()?;
    let status = reader.u32()?;
    let known = STATUSES.get(status as usize);
    Ok(Header {
        program,
        procedure,
        kind: *kind,
        serial,
        status: *known.ok_or(XdrError::Number(status))?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call() -> Message {
        Message {
            header: Header {
                program: REMOTE,
                procedure: 1,
                kind: Kind::Call,
                serial: 3,
                status: Status::Ok,
            },
            payload: vec![0, 0, 0, 9],
        }
    }

    #[test]
    fn a_frame_is_laid_out_as_libvirt_expects() {
        let frame = call().frame();
        let expected = [
            0, 0, 0, 32, 0x20, 0, 0x80, 0x86, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0,
            0, 0, 0, 0, 0, 9,
        ];
        assert_eq!(frame, expected);
        let mut input = frame.as_slice();
        assert_eq!(Message::read(&mut input).unwrap(), Some(call()));
        assert_eq!(Message::read(&mut input).unwrap(), None);
    }

    #[test]
    fn what_is_no_frame_is_refused() {
        let frame = call().frame();
        for cut in 1..frame.len() {
            assert!(Message::read(&mut &frame[..cut]).is_err(), "{cut}");
        }
        for (at, value) in [(3, 27), (0, 3), (11, 2), (19, 6), (27, 3)] {
            let mut changed = frame.clone();
            changed[at] = value;
            assert!(Message::read(&mut changed.as_slice()).is_err(), "{at}");
        }
    }
}
