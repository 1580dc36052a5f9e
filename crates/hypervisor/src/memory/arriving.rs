//! Delivers the RAM of a guest that runs before all of it has arrived (post-copy), over the page
//! server that holds QEMU's socket.
//!
//! ```text
//! PageServer::connect -> Incoming::load_without(missing) -> Arriving
//! a later agent:         Arriving::reconnect, or recover if the server has ended
//! next_event(), give(pages) ... -> finish()
//! ```
//!
//! QEMU asks for a page when its guest, or a device that is loaded, waits for it. Pages that were
//! neither missing nor written are zero: QEMU asks for those as well, and the server answers. QEMU
//! fails if it gets a page twice, so each page is given once.

use super::incoming::{IncomingError, Loaded, POLL, POSTCOPY, connect, is_loaded, reason};
use super::page_server::line::{
    Inbox, Known, Message, PAGES_MAX, SEND_BUFFER_BYTES, ToAgent, ToServer, put_ranges, ranges,
};
use super::pages::{self, Pages};
use super::source::set_capabilities;
use crate::qmp::{COMMAND_TIMEOUT, Qmp};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use longhaul_protocol::BlockRange;
use longhaul_qemu_stream::return_path::{self, Message as ReturnPathMessage};
use longhaul_qemu_stream::{Page, Prelude, RamBlock, Writer};
use rustix::net::sockopt::set_socket_send_buffer_size;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::json;
use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::UnixStream;
use tokio::time::timeout;

/// How long QEMU may take to end its migration when it has all pages.
const END_TIMEOUT: Duration = Duration::from_secs(60);
/// How long QEMU may take to notice that its socket broke, and to go on.
const RECOVER_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a page server may take to say what it has.
const GREETING_TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes taken from the server at once.
const READ_BYTES: usize = 64 << 10;

/// Pages of a RAM block that the destination does not have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Missing {
    /// The place of the block in the prelude's list.
    pub block: usize,
    /// The pages, in ascending order, without overlap.
    pub pages: Vec<BlockRange>,
}

/// Pages that the guest waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// The place of the block in the prelude's list.
    pub block: usize,
    /// The pages: missing ones, none of them given yet.
    pub pages: BlockRange,
}

/// What QEMU and the page server say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ArrivingEvent {
    /// The guest waits for pages.
    Request(Request),
    /// The devices are loaded, and the guest is paused: its owner may let it run.
    Loaded(Loaded),
    /// The page server has all pages that were given.
    Taken,
}

/// A page server that has no QEMU yet. It ends when this is dropped.
#[derive(Debug)]
pub struct PageServer {
    stream: UnixStream,
    inbox: Inbox,
}

/// A guest that is loaded, and some of whose RAM has not arrived. When this is dropped QEMU is
/// served on, as far as that needs no page that is missing.
pub struct Arriving {
    server: PageServer,
    pages: Pages,
    requests: VecDeque<Request>,
    /// Waits until QEMU has loaded the devices.
    loading: Option<BoxFuture<'static, Result<Loaded, IncomingError>>>,
    qmp_of_loading: Option<Qmp>,
    /// What the server gets next, and how much of it has been written.
    out: Vec<u8>,
    written: usize,
}

impl PageServer {
    /// Connects to a page server that has no QEMU yet.
    pub async fn connect(path: &Path) -> io::Result<Self> {
        let greeted = async {
            let mut server = Self::open(path).await?;
            match server.heard().await? {
                (ToAgent::Empty, _) => Ok(server),
                _ => Err(io::Error::other("this page server has a QEMU already")),
            }
        };
        timeout(GREETING_TIMEOUT, greeted).await?
    }

    async fn open(path: &Path) -> io::Result<Self> {
        let stream = UnixStream::connect(path).await?;
        set_socket_send_buffer_size(&stream, SEND_BUFFER_BYTES)?;
        Ok(Self {
            stream,
            inbox: Inbox::default(),
        })
    }

    /// Waits for a message.
    async fn heard(&mut self) -> io::Result<(ToAgent, Vec<BlockRange>)> {
        loop {
            if let Some((message, content)) = self.inbox.next()? {
                return Ok((message, ranges(content).collect()));
            }
            self.stream.readable().await?;
            self.read()?;
        }
    }

    /// Takes what can be read now.
    fn read(&mut self) -> io::Result<()> {
        let mut buffer = [0; READ_BYTES];
        match self.stream.try_read(&mut buffer) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(length) => {
                self.inbox.fill(buffer.get(..length).unwrap_or_default());
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Hands over QEMU's socket, and what is known of the pages. Returns when QEMU is served.
    pub(super) async fn serve(
        &mut self,
        qemu: BorrowedFd<'_>,
        prelude: &[u8],
        pages: &Pages,
        resume: bool,
    ) -> Result<(), IncomingError> {
        let served = async {
            let begin = ToServer::Begin {
                prelude_bytes: prelude.len(),
            };
            let begin = begin.to_bytes();
            let sent = self.stream.async_io(Interest::WRITABLE, || {
                let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
                let mut ancillary = SendAncillaryBuffer::new(&mut space);
                let files = [qemu];
                if !ancillary.push(SendAncillaryMessage::ScmRights(&files)) {
                    return Err(io::Error::other("no room for a socket"));
                }
                let bytes = [IoSlice::new(&begin)];
                let sent = sendmsg(&self.stream, &bytes, &mut ancillary, SendFlags::NOSIGNAL);
                Ok(sent?)
            });
            let sent = sent.await?;
            let mut out = begin.get(sent..).unwrap_or_default().to_vec();
            out.extend(prelude);
            let kinds = [
                (
                    Known::Missing,
                    &[pages::Page::Missing, pages::Page::Wanted][..],
                ),
                (Known::Given, &[pages::Page::Given]),
            ];
            for block in 0..pages.blocks() {
                for (known, of) in kinds {
                    let head = |ranges| ToServer::Known {
                        block,
                        ranges,
                        known,
                    };
                    put_ranges(&pages.ranges(block, of), head, &mut out);
                }
            }
            out.extend(ToServer::Serve { resume }.to_bytes());
            self.stream.write_all(&out).await?;
            match self.heard().await? {
                (ToAgent::Serves, _) => Ok(()),
                (other, _) => Err(io::Error::other(format!("it answers {other:?}"))),
            }
        };
        let served = timeout(GREETING_TIMEOUT, served).await;
        let served = served.map_err(io::Error::from).and_then(|served| served);
        served.map_err(IncomingError::PageServer)
    }
}

impl Arriving {
    pub(super) fn new(server: PageServer, pages: Pages) -> Self {
        Self {
            server,
            pages,
            requests: VecDeque::new(),
            loading: None,
            qmp_of_loading: None,
            out: Vec::new(),
            written: 0,
        }
    }

    /// Also waits until QEMU has loaded the devices.
    pub(super) fn loading(mut self, qmp: Qmp, start: Instant) -> Self {
        self.qmp_of_loading = Some(qmp.clone());
        let loaded = async move {
            while !is_loaded(&qmp, start).await? {
                tokio::time::sleep(POLL).await;
            }
            let load_time = start.elapsed();
            Ok(Loaded { load_time })
        };
        self.loading = Some(loaded.boxed());
        self
    }

    /// Goes on with a QEMU that was served for an earlier agent, by the page server at `path`.
    pub async fn reconnect(path: &Path, prelude: &Prelude) -> io::Result<Self> {
        let greeted = async {
            let mut server = PageServer::open(path).await?;
            let mut pages = Pages::new(prelude);
            loop {
                match server.heard().await? {
                    (ToAgent::Missing { block, .. }, ranges) => {
                        for range in ranges {
                            if !pages.set(block, range, pages::Page::Missing) {
                                return Err(io::Error::other("it serves another guest"));
                            }
                        }
                    }
                    (ToAgent::Serves, _) => return Ok(Self::new(server, pages)),
                    (ToAgent::Empty, _) => return Err(io::Error::other("it has no QEMU")),
                    (ToAgent::Want { .. }, _) => {
                        return Err(io::Error::other("it wants pages too early"));
                    }
                }
            }
        };
        timeout(GREETING_TIMEOUT, greeted).await?
    }

    /// Goes on with a QEMU whose post-copy is paused because its page server ended, or breaks now:
    /// lets it listen at a path again, which may be another one for QEMU, and hands the new socket
    /// to another server. `missing` are the pages that were missing when the guest was loaded; QEMU
    /// says which of them have arrived.
    /// Returns `None` if QEMU has all of them, and has ended its post-copy.
    pub async fn recover(
        mut server: PageServer,
        qmp: &Qmp,
        (path, of_qemu): (&Path, &Path),
        prelude: &Prelude,
        missing: &[Missing],
    ) -> Result<Option<Self>, IncomingError> {
        let recovering = async {
            if !until_paused(qmp).await? {
                return Ok(None);
            }
            let arguments = json!({"uri": format!("unix:{}", of_qemu.display())});
            qmp.execute("migrate-recover", arguments, COMMAND_TIMEOUT)
                .await?;
            let mut socket = connect(path).await?;
            let mut pages = Pages::without(prelude, missing);
            received(&mut socket, prelude, &mut pages).await?;
            // QEMU says nothing more until it is told to resume.
            let head = prelude.bytes.as_slice();
            server.serve(socket.as_fd(), head, &pages, true).await?;
            Ok(Some(Self::new(server, pages)))
        };
        match timeout(RECOVER_TIMEOUT, recovering).await {
            Ok(Ok(recovered)) => Ok(recovered),
            Ok(Err(error)) => Err(reason(qmp, error).await),
            Err(_) => Err(reason(qmp, IncomingError::Timeout(RECOVER_TIMEOUT)).await),
        }
    }

    /// Returns the missing pages that were not given yet.
    pub fn missing_pages(&self) -> Vec<Missing> {
        self.pages.missing_pages()
    }

    /// Returns the number of pages that were not given yet.
    pub fn missing(&self) -> u64 {
        self.pages.missing()
    }

    /// Waits for what QEMU or the server says next, and passes on what was given. Safe to cancel.
    pub async fn next_event(&mut self) -> Result<ArrivingEvent, IncomingError> {
        loop {
            self.heard().map_err(IncomingError::PageServer)?;
            if let Some(request) = self.requests.pop_front() {
                return Ok(ArrivingEvent::Request(request));
            }
            let gives = !self.out.is_empty();
            let interest = match gives {
                true => Interest::READABLE | Interest::WRITABLE,
                false => Interest::READABLE,
            };
            let loaded = async {
                match &mut self.loading {
                    Some(loading) => loading.await,
                    None => std::future::pending().await,
                }
            };
            let moved = tokio::select! {
                ready = self.server.stream.ready(interest) => {
                    let ready = ready.map_err(IncomingError::PageServer)?;
                    let wrote = if gives && ready.is_writable() { self.write() } else { Ok(()) };
                    wrote.and_then(|()| match ready.is_readable() {
                        true => self.server.read(),
                        false => Ok(()),
                    })
                }
                loaded = loaded => {
                    self.loading = None;
                    self.qmp_of_loading = None;
                    return Ok(ArrivingEvent::Loaded(loaded?));
                }
            };
            if let Err(error) = moved {
                let error = IncomingError::PageServer(error);
                // The server ends with QEMU's socket, which QEMU closes when it cannot load.
                return Err(match &self.qmp_of_loading {
                    Some(qmp) => reason(qmp, error).await,
                    None => error,
                });
            }
            if gives && self.out.is_empty() {
                return Ok(ArrivingEvent::Taken);
            }
        }
    }

    /// Takes the messages that were read.
    fn heard(&mut self) -> io::Result<()> {
        while let Some((message, _)) = self.server.inbox.next()? {
            let ToAgent::Want { block, pages } = message else {
                return Err(io::Error::other(format!("it says {message:?}")));
            };
            let missing = |page: &u64| {
                let known = self.pages.get(block, *page);
                matches!(known, Some(pages::Page::Missing | pages::Page::Wanted))
            };
            let wanted = pages.blocks().filter(missing).map(|page| Request {
                block,
                pages: BlockRange::new(page, 1),
            });
            self.requests.extend(wanted);
        }
        Ok(())
    }

    /// Writes what the server takes now.
    fn write(&mut self) -> io::Result<()> {
        while let Some(rest) = self.out.get(self.written..).filter(|rest| !rest.is_empty()) {
            match self.server.stream.try_write(rest) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(length) => self.written += length,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        self.out.clear();
        self.written = 0;
        Ok(())
    }

    /// Gives QEMU pages of a block; no content means zeros. Pages that are not missing, or not any
    /// more, are left out. They are on their way once [`Self::next_event`] has returned
    /// [`ArrivingEvent::Taken`].
    pub fn give(&mut self, block: usize, pages: &[(u64, Option<&Page>)]) {
        let missing = |(page, _): &&(u64, _)| self.pages.give(block, *page);
        let new: Vec<_> = pages.iter().filter(missing).collect();
        let mut rest = new.as_slice();
        while let Some((first, content)) = rest.first() {
            let follow = (*first..).zip(rest).take(PAGES_MAX as usize);
            let alike = follow.take_while(|(expected, (page, of))| {
                expected == page && of.is_some() == content.is_some()
            });
            let (now, later) = rest.split_at(alike.count());
            let give = ToServer::Give {
                block,
                pages: BlockRange::new(*first, now.len() as u64),
                zero: content.is_none(),
            };
            self.out.extend(give.to_bytes());
            let content = now.iter().filter_map(|(_, content)| *content);
            content.for_each(|content| self.out.extend(content));
            rest = later;
        }
        let pages = &self.pages;
        self.requests.retain(|request| {
            let known = pages.get(request.block, request.pages.start);
            matches!(known, Some(pages::Page::Missing | pages::Page::Wanted))
        });
        // Most often the socket takes it at once. What fails here fails again in the next event.
        let _ = self.write();
    }

    /// Returns whether the page server has all pages that were given.
    pub fn is_taken(&self) -> bool {
        self.out.is_empty()
    }

    /// Ends the stream when every page was given, and waits until QEMU has ended its migration.
    pub async fn finish(mut self, qmp: &Qmp) -> Result<(), IncomingError> {
        if self.missing() > 0 {
            return Err(IncomingError::Content("pages are missing"));
        }
        self.out.extend(ToServer::End.to_bytes());
        let finished = async {
            let rest = self.out.get(self.written..).unwrap_or_default();
            let said = self.server.stream.write_all(rest).await;
            said.map_err(IncomingError::PageServer)?;
            ended(qmp).await
        };
        match timeout(END_TIMEOUT, finished).await {
            Ok(finished) => finished?,
            Err(_) => return Err(reason(qmp, IncomingError::Timeout(END_TIMEOUT)).await),
        }
        end_of_postcopy(qmp).await
    }
}

/// Makes a QEMU that has ended its post-copy ready for the guest's next move.
async fn end_of_postcopy(qmp: &Qmp) -> Result<(), IncomingError> {
    let off = std::iter::once((POSTCOPY, false));
    Ok(set_capabilities(qmp, off).await?)
}

/// Waits until QEMU has ended its migration.
async fn ended(qmp: &Qmp) -> Result<(), IncomingError> {
    loop {
        let status = qmp.query("query-migrate").await?;
        match status["status"].as_str() {
            Some("completed") => return Ok(()),
            Some("failed" | "postcopy-paused") => {
                return Err(reason(qmp, IncomingError::Ended).await);
            }
            _ => tokio::time::sleep(POLL).await,
        }
    }
}

/// Asks QEMU which pages it got.
async fn received(
    socket: &mut UnixStream,
    prelude: &Prelude,
    pages: &mut Pages,
) -> Result<(), IncomingError> {
    let writer = Writer::new(prelude);
    let mut out = Vec::new();
    for block in 0..prelude.blocks.len() {
        writer.received_bitmap(block, &mut out);
    }
    let sent = socket.write_all(&out).await;
    sent.map_err(|_| IncomingError::Ended)?;
    let most = prelude.blocks.iter().map(RamBlock::pages).max();
    let bitmap_bytes_max = most.unwrap_or(0).div_ceil(64) * 8;
    let mut back = return_path::Parser::new(bitmap_bytes_max);
    let mut lacks = prelude.blocks.len();
    let mut buffer = vec![0; READ_BYTES];
    while lacks > 0 {
        let length = socket.read(&mut buffer).await.unwrap_or(0);
        let mut input = buffer.get(..length).unwrap_or_default();
        if input.is_empty() {
            return Err(IncomingError::Ended);
        }
        while let Some(message) = back.next(&mut input)? {
            if let ReturnPathMessage::ReceivedBitmap { block, bitmap } = message {
                let mut blocks = prelude.blocks.iter();
                if let Some(block) = blocks.position(|of| of.name == block) {
                    pages.received(block, &bitmap);
                }
                lacks = lacks.saturating_sub(1);
            }
        }
    }
    Ok(())
}

/// Waits until QEMU has noticed that its socket broke. Returns false if it needed it no more.
async fn until_paused(qmp: &Qmp) -> Result<bool, IncomingError> {
    loop {
        let status = qmp.query("query-migrate").await?;
        match status["status"].as_str() {
            Some("postcopy-paused") => return Ok(true),
            Some("completed") => {
                end_of_postcopy(qmp).await?;
                return Ok(false);
            }
            Some("postcopy-active" | "postcopy-recover") => tokio::time::sleep(POLL).await,
            other => {
                let state = other.unwrap_or("not migrating").to_owned();
                return Err(IncomingError::State(state));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::page_server::{self, End};
    use longhaul_protocol::BLOCK_SIZE;
    use longhaul_qemu_stream::{Content, Event, Limits, Parser};
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream as StdStream;
    use std::thread::{self, JoinHandle};

    const NAME: &str = "pc.ram";
    const PAGES: u64 = 512;

    fn page(number: u64) -> Page {
        [number as u8 | 1; BLOCK_SIZE]
    }

    /// Asks for each page as a guest does, one at a time; returns how long each took, and leaves.
    fn guest(mut qemu: StdStream, prelude: Vec<u8>) -> JoinHandle<Vec<Duration>> {
        thread::spawn(move || {
            let mut stream = Parser::new(Limits::default());
            stream.next(&mut prelude.as_slice()).unwrap();
            stream.keep(0);
            let mut buffer = [0; 2 * BLOCK_SIZE];
            let mut took = Vec::new();
            for number in 0..PAGES {
                let request = ReturnPathMessage::RequestPages {
                    block: Some(NAME.to_owned()),
                    offset: number * BLOCK_SIZE as u64,
                    length: BLOCK_SIZE as u32,
                };
                let mut bytes = Vec::new();
                request.write(&mut bytes);
                let began = Instant::now();
                qemu.write_all(&bytes).unwrap();
                let mut has_it = false;
                while !has_it {
                    let length = qemu.read(&mut buffer).unwrap();
                    assert!(length > 0, "its socket is closed");
                    let mut input = &buffer[..length];
                    while let Some(event) = stream.next(&mut input).unwrap() {
                        if let Event::Page {
                            page: got, content, ..
                        } = &event
                        {
                            assert_eq!(*got, number);
                            assert_eq!(*content, Content::Kept(Box::new(page(number))));
                        }
                        has_it |= matches!(event, Event::SectionEnd);
                    }
                }
                took.push(began.elapsed());
            }
            took
        })
    }

    fn median(mut all: Vec<Duration>) -> Duration {
        all.sort();
        all[all.len() / 2]
    }

    #[tokio::test]
    async fn a_fault_passes_through_the_page_server_and_back() {
        let block = RamBlock {
            name: NAME.to_owned(),
            used_bytes: PAGES * BLOCK_SIZE as u64,
        };
        let bytes = Writer::prelude("pc-q35-10.0", 2, &[block]);
        let prelude = crate::memory::read_prelude(&bytes).unwrap();

        // Without a page server.
        let (ours, theirs) = StdStream::pair().unwrap();
        let asking = guest(theirs, bytes.clone());
        ours.set_nonblocking(true).unwrap();
        let mut socket = UnixStream::from_std(ours).unwrap();
        let mut writer = Writer::new(&prelude);
        let mut back = return_path::Parser::new(0);
        let mut served = 0;
        while served < PAGES {
            let mut buffer = [0; 4096];
            let length = socket.read(&mut buffer).await.unwrap();
            let mut input = &buffer[..length];
            while let Some(ReturnPathMessage::RequestPages { offset, .. }) =
                back.next(&mut input).unwrap()
            {
                let number = offset / BLOCK_SIZE as u64;
                let mut out = Vec::new();
                writer.section_start(false, &mut out);
                writer.page(0, number, Some(&page(number)), &mut out);
                writer.section_end(&mut out);
                socket.write_all(&out).await.unwrap();
                served += 1;
            }
        }
        let direct = median(asking.join().unwrap());

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pages");
        let at = path.clone();
        let process = thread::spawn(move || page_server::run(&at).unwrap());
        let mut server = loop {
            match PageServer::connect(&path).await {
                Ok(server) => break server,
                Err(error) => assert!(!process.is_finished(), "{error}"),
            }
        };
        let (ours, theirs) = StdStream::pair().unwrap();
        let missing = [Missing {
            block: 0,
            pages: vec![BlockRange::new(0, PAGES)],
        }];
        let pages = Pages::without(&prelude, &missing);
        let began = Instant::now();
        let handed = server.serve(ours.as_fd(), &prelude.bytes, &pages, false);
        handed.await.unwrap();
        let handed = began.elapsed();
        drop(ours);
        let asking = guest(theirs, bytes);
        let mut arriving = Arriving::new(server, pages);
        while arriving.missing() > 0 || !arriving.is_taken() {
            if let ArrivingEvent::Request(request) = arriving.next_event().await.unwrap() {
                let number = request.pages.start;
                arriving.give(0, &[(number, Some(&page(number)))]);
            }
        }
        let through = median(asking.join().unwrap());
        println!("handed over in {handed:?}; a fault: {direct:?} directly, {through:?} through it");
        // QEMU's end of the socket is closed.
        assert_eq!(process.join().unwrap(), End::QemuClosed { missing: 0 });
        assert!(!path.exists());
        assert!(arriving.next_event().await.is_err());
    }
}
