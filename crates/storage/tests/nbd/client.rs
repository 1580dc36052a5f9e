//! A client that sends whatever a test wants, valid or not.

use crate::common::{NAME, PATIENCE, Served};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

pub(crate) const ABORT: u32 = 2;
pub(crate) const LIST: u32 = 3;
pub(crate) const INFO: u32 = 6;
pub(crate) const GO: u32 = 7;
pub(crate) const STRUCTURED_REPLY: u32 = 8;
pub(crate) const LIST_META: u32 = 9;
pub(crate) const SET_META: u32 = 10;

pub(crate) const ACK: u32 = 1;
pub(crate) const REP_INFO: u32 = 3;
pub(crate) const REP_META: u32 = 4;
pub(crate) const UNSUP: u32 = 0x8000_0001;
pub(crate) const POLICY: u32 = 0x8000_0002;
pub(crate) const INVALID: u32 = 0x8000_0003;
pub(crate) const UNKNOWN: u32 = 0x8000_0006;
pub(crate) const TOO_BIG: u32 = 0x8000_0009;

pub(crate) const READ: u16 = 0;
pub(crate) const WRITE: u16 = 1;
pub(crate) const DISC: u16 = 2;
pub(crate) const FLUSH: u16 = 3;
pub(crate) const TRIM: u16 = 4;
pub(crate) const ZEROES: u16 = 6;
pub(crate) const STATUS: u16 = 7;

pub(crate) const FUA: u16 = 1;
pub(crate) const NO_HOLE: u16 = 2;
pub(crate) const REQ_ONE: u16 = 8;
pub(crate) const FAST_ZERO: u16 = 16;

pub(crate) const EIO: u32 = 5;
pub(crate) const EINVAL: u32 = 22;
pub(crate) const ENOSPC: u32 = 28;
pub(crate) const EOVERFLOW: u32 = 75;

pub(crate) struct Client {
    pub(crate) stream: UnixStream,
}

impl Client {
    /// Connects, and sends nothing.
    pub(crate) fn silent(served: &Served) -> Self {
        Self::at(&served.socket())
    }

    fn at(socket: &Path) -> Self {
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Self { stream }
    }

    /// Connects, and begins the handshake.
    pub(crate) fn haggling(served: &Served) -> Self {
        Self::silent(served).greeted()
    }

    /// Connects to a socket, and chooses the export.
    pub(crate) fn ready_at(socket: &Path) -> Self {
        let mut client = Self::at(socket).greeted();
        assert_eq!(client.option(GO, &info(NAME, &[])), ACK);
        client
    }

    fn greeted(self) -> Self {
        let mut client = self;
        let greeting: [u8; 18] = client.take();
        assert_eq!(&greeting, b"NBDMAGICIHAVEOPT\0\x03");
        client.send(&3u32.to_be_bytes());
        client
    }

    /// Connects, and chooses the export.
    pub(crate) fn ready(served: &Served, structured: bool) -> Self {
        let mut client = Self::haggling(served);
        if structured {
            assert_eq!(client.option(STRUCTURED_REPLY, b""), ACK);
            let query = contexts(NAME, &["base:allocation"]);
            assert_eq!(client.option(SET_META, &query), ACK);
        }
        assert_eq!(client.option(GO, &info(NAME, &[])), ACK);
        client
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    pub(crate) fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    pub(crate) fn take_many(&mut self, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    /// Returns whether the server has hung up, ignoring what it sent before.
    pub(crate) fn is_cut_off(&mut self) -> bool {
        let mut rest = Vec::new();
        match self.stream.read_to_end(&mut rest) {
            Ok(_) => true,
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }

    pub(crate) fn send_option(&mut self, option: u32, length: u32, data: &[u8]) {
        let header = [
            &b"IHAVEOPT"[..],
            &option.to_be_bytes(),
            &length.to_be_bytes(),
            data,
        ];
        self.send(&header.concat());
    }

    /// Returns one reply to an option: its kind and data.
    pub(crate) fn reply(&mut self, option: u32) -> (u32, Vec<u8>) {
        assert_eq!(u64::from_be_bytes(self.take()), 0x3_e889_0455_65a9);
        assert_eq!(u32::from_be_bytes(self.take()), option);
        let kind = u32::from_be_bytes(self.take());
        let length = u32::from_be_bytes(self.take());
        (kind, self.take_many(length as usize))
    }

    /// Returns all replies to an option.
    pub(crate) fn replies(&mut self, option: u32, data: &[u8]) -> Vec<(u32, Vec<u8>)> {
        self.send_option(option, data.len() as u32, data);
        let mut replies = Vec::new();
        loop {
            let reply = self.reply(option);
            let last = reply.0 == ACK || reply.0 >= 1 << 31;
            replies.push(reply);
            if last {
                return replies;
            }
        }
    }

    /// Returns the final reply to an option.
    pub(crate) fn option(&mut self, option: u32, data: &[u8]) -> u32 {
        self.replies(option, data).pop().unwrap().0
    }

    pub(crate) fn request(&mut self, command: u16, flags: u16, offset: u64, length: u32) {
        self.send(&request(command, flags, offset, length));
    }

    /// Sends a request with a simple reply. Returns its error.
    pub(crate) fn ask(&mut self, command: u16, flags: u16, offset: u64, length: u32) -> u32 {
        self.request(command, flags, offset, length);
        self.error()
    }

    pub(crate) fn write(&mut self, flags: u16, offset: u64, bytes: &[u8]) -> u32 {
        self.request(WRITE, flags, offset, bytes.len() as u32);
        self.send(bytes);
        self.error()
    }

    pub(crate) fn read(&mut self, offset: u64, length: u32) -> Result<Vec<u8>, u32> {
        match self.ask(READ, 0, offset, length) {
            0 => Ok(self.take_many(length as usize)),
            error => Err(error),
        }
    }

    /// Returns a simple reply's error.
    pub(crate) fn error(&mut self) -> u32 {
        assert_eq!(u32::from_be_bytes(self.take()), 0x6744_6698);
        let error = u32::from_be_bytes(self.take());
        assert_eq!(u64::from_be_bytes(self.take()), COOKIE);
        error
    }

    /// Returns the kind and payload of a structured reply with one part.
    pub(crate) fn part(&mut self) -> (u16, Vec<u8>) {
        assert_eq!(u32::from_be_bytes(self.take()), 0x668e_33ef);
        assert_eq!(u16::from_be_bytes(self.take()), 1, "not the last part");
        let kind = u16::from_be_bytes(self.take());
        assert_eq!(u64::from_be_bytes(self.take()), COOKIE);
        let length = u32::from_be_bytes(self.take());
        (kind, self.take_many(length as usize))
    }
}

const COOKIE: u64 = 0x0123_4567_89ab_cdef;

pub(crate) fn request(command: u16, flags: u16, offset: u64, length: u32) -> Vec<u8> {
    [
        &0x2560_9513u32.to_be_bytes()[..],
        &flags.to_be_bytes(),
        &command.to_be_bytes(),
        &COOKIE.to_be_bytes(),
        &offset.to_be_bytes(),
        &length.to_be_bytes(),
    ]
    .concat()
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes()[..], text.as_bytes()].concat()
}

pub(crate) fn info(name: &str, wanted: &[u16]) -> Vec<u8> {
    let mut data = text(name);
    data.extend((wanted.len() as u16).to_be_bytes());
    wanted
        .iter()
        .for_each(|kind| data.extend(kind.to_be_bytes()));
    data
}

pub(crate) fn contexts(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut data = text(name);
    data.extend((queries.len() as u32).to_be_bytes());
    queries.iter().for_each(|query| data.extend(text(query)));
    data
}
