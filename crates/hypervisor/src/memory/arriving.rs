//! Delivers the RAM of a guest that runs before all of it has arrived (post-copy).
//!
//! ```text
//! Incoming::load_without(missing) -> next_event(), give(pages) ... -> finish()
//! ```
//!
//! QEMU asks for a page when its guest, or a device that is loaded, waits for it. Pages that were
//! neither missing nor written are zero: QEMU asks for those as well, and gets the answer here.
//! QEMU fails if it gets a page twice, so each page is given once.

use super::incoming::{IncomingError, Loaded, POLL, POSTCOPY, connect, is_loaded, reason};
use super::source::set_capabilities;
use crate::qmp::{COMMAND_TIMEOUT, Qmp};
use longhaul_protocol::{BLOCK_SIZE, BlockRange};
use longhaul_qemu_stream::return_path::{self, Message};
use longhaul_qemu_stream::{Page, Prelude, RamBlock, Writer};
use serde_json::json;
use std::collections::VecDeque;
use std::ops::Range;
use std::path::Path;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

/// How long QEMU may take to end its migration when it has all pages.
const END_TIMEOUT: Duration = Duration::from_secs(60);

/// How long QEMU may take to notice that its socket broke, and to go on.
const RECOVER_TIMEOUT: Duration = Duration::from_secs(60);

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

/// What QEMU says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ArrivingEvent {
    /// The guest waits for pages.
    Request(Request),
    /// The devices are loaded, and the guest is paused: its owner may let it run.
    Loaded(Loaded),
}

/// What is known of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// It was there when the guest was loaded, or is zero.
    There,
    Missing,
    Given,
}

/// The states of a block's pages.
#[derive(Debug)]
struct Block {
    name: String,
    states: Vec<State>,
}

/// A guest that is loaded, and some of whose RAM has not arrived.
#[derive(Debug)]
pub struct Arriving {
    qmp: Qmp,
    socket: UnixStream,
    back: return_path::Parser,
    writer: Writer,
    blocks: Vec<Block>,
    /// The block of the newest request, which the next one may leave out.
    recent: Option<usize>,
    requests: VecDeque<Request>,
    missing: u64,
    /// The time since which QEMU loads the devices.
    loading: Option<Instant>,
    /// Whether QEMU has yet to say that it goes on after a pause.
    resuming: bool,
    /// What QEMU gets next, and how much of it has been written: a call that is cancelled leaves
    /// the rest to the next one.
    out: Vec<u8>,
    written: usize,
}

impl Arriving {
    pub(super) fn new(
        qmp: Qmp,
        socket: UnixStream,
        back: return_path::Parser,
        prelude: &Prelude,
        missing: &[Missing],
    ) -> Self {
        let mut blocks: Vec<Block> = prelude
            .blocks
            .iter()
            .map(|block| Block {
                name: block.name.clone(),
                states: vec![State::There; block.pages() as usize],
            })
            .collect();
        let mut count = 0;
        for missing in missing {
            let states = blocks.get_mut(missing.block).map(|block| &mut block.states);
            let Some(states) = states else { continue };
            for range in &missing.pages {
                let range = range.start as usize..range.end() as usize;
                if let Some(states) = states.get_mut(range) {
                    count += states.len() as u64;
                    states.fill(State::Missing);
                }
            }
        }
        Self {
            qmp,
            socket,
            back,
            writer: Writer::new(prelude),
            blocks,
            recent: None,
            requests: VecDeque::new(),
            missing: count,
            loading: None,
            resuming: false,
            out: Vec::new(),
            written: 0,
        }
    }

    /// Goes on with a QEMU whose post-copy is paused because its socket broke, or breaks now: lets
    /// it listen at `path` again. `missing` are the pages that were missing when the guest was
    /// loaded; QEMU says which of them have arrived. Returns `None` if QEMU has all of them, and
    /// has ended its post-copy.
    pub async fn recover(
        qmp: &Qmp,
        path: &Path,
        prelude: &Prelude,
        missing: &[Missing],
    ) -> Result<Option<Self>, IncomingError> {
        let recovering = async {
            if !until_paused(qmp).await? {
                return Ok(None);
            }
            let arguments = json!({"uri": format!("unix:{}", path.display())});
            qmp.execute("migrate-recover", arguments, COMMAND_TIMEOUT)
                .await?;
            let socket = connect(path).await?;
            let pages = prelude.blocks.iter().map(RamBlock::pages);
            let bitmap_bytes_max = pages.max().unwrap_or(0).div_ceil(64) * 8;
            let back = return_path::Parser::new(bitmap_bytes_max);
            let mut arriving = Self::new(qmp.clone(), socket, back, prelude, missing);
            for block in 0..arriving.blocks.len() {
                arriving.writer.received_bitmap(block, &mut arriving.out);
            }
            Writer::postcopy_resume(&mut arriving.out);
            arriving.resuming = true;
            while arriving.resuming {
                arriving.flush().await?;
                if arriving.read().await? == 0 {
                    return Err(IncomingError::Ended);
                }
            }
            Ok(Some(arriving))
        };
        match tokio::time::timeout(RECOVER_TIMEOUT, recovering).await {
            Ok(Ok(recovered)) => Ok(recovered),
            Ok(Err(error)) => Err(reason(qmp, error).await),
            Err(_) => Err(reason(qmp, IncomingError::Timeout(RECOVER_TIMEOUT)).await),
        }
    }

    /// Takes over which pages of a block QEMU got, one bit each.
    fn received(&mut self, name: &str, bitmap: &[u8]) {
        let Some(block) = self.blocks.iter_mut().find(|block| block.name == name) else {
            return;
        };
        for (page, state) in block.states.iter_mut().enumerate() {
            let bits = bitmap.get(page / 8).copied().unwrap_or(0);
            if bits & 1 << (page % 8) == 0 {
                continue;
            }
            if *state == State::Missing {
                self.missing -= 1;
            }
            *state = State::Given;
        }
    }

    /// Returns the missing pages that were not given yet.
    pub fn missing_pages(&self) -> Vec<Missing> {
        let of_block = |(block, known): (usize, &Block)| {
            let mut pages: Vec<BlockRange> = Vec::new();
            let missing = known.states.iter().zip(0..);
            for (_, page) in missing.filter(|(state, _)| **state == State::Missing) {
                match pages.last_mut().filter(|range| range.end() == page) {
                    Some(range) => range.count += 1,
                    None => pages.push(BlockRange::new(page, 1)),
                }
            }
            (!pages.is_empty()).then_some(Missing { block, pages })
        };
        self.blocks
            .iter()
            .enumerate()
            .filter_map(of_block)
            .collect()
    }

    /// Returns the number of pages that were not given yet.
    pub fn missing(&self) -> u64 {
        self.missing
    }

    /// Writes the discards and the devices.
    pub(super) async fn begin(&mut self, package: Vec<u8>) -> Result<(), IncomingError> {
        self.loading = Some(Instant::now());
        self.out = package;
        self.flush().await
    }

    /// Waits for what QEMU says next. Safe to cancel.
    pub async fn next_event(&mut self) -> Result<ArrivingEvent, IncomingError> {
        loop {
            if let Some(request) = self.requests.pop_front() {
                return Ok(ArrivingEvent::Request(request));
            }
            self.flush().await?;
            let qmp = self.qmp.clone();
            let loading = self.loading;
            let loaded = async {
                let Some(start) = loading else {
                    return std::future::pending().await;
                };
                loop {
                    tokio::time::sleep(POLL).await;
                    if is_loaded(&qmp, start).await? {
                        return Ok::<_, IncomingError>(start.elapsed());
                    }
                }
            };
            tokio::select! {
                read = self.read() => {
                    if read? == 0 {
                        return Err(reason(&self.qmp, IncomingError::Ended).await);
                    }
                }
                load_time = loaded => {
                    let load_time = load_time?;
                    self.loading = None;
                    return Ok(ArrivingEvent::Loaded(Loaded { load_time }));
                }
            }
        }
    }

    /// Reads messages. Returns 0 when there will be no more. Safe to cancel.
    async fn read(&mut self) -> Result<usize, IncomingError> {
        let mut buffer = [0; 4096];
        let length = self.socket.read(&mut buffer).await.unwrap_or(0);
        let mut input = buffer.get(..length).unwrap_or_default();
        while let Some(message) = self.back.next(&mut input)? {
            match message {
                Message::RequestPages {
                    block,
                    offset,
                    length,
                } => {
                    if let Some(name) = block {
                        self.recent = self.blocks.iter().position(|block| block.name == name);
                    }
                    let first = offset / BLOCK_SIZE as u64;
                    let count = u64::from(length).div_ceil(BLOCK_SIZE as u64);
                    self.requested(first..first.saturating_add(count))?;
                }
                Message::ReceivedBitmap { block, bitmap } => self.received(&block, &bitmap),
                Message::ResumeAck(_) => self.resuming = false,
                Message::Pong(_) | Message::Shut(_) | Message::SwitchoverAck => {}
            }
        }
        Ok(length)
    }

    fn requested(&mut self, pages: Range<u64>) -> Result<(), IncomingError> {
        const STRANGE: IncomingError =
            IncomingError::Content("QEMU asks for a page that the guest does not have");
        let index = self.recent.ok_or(STRANGE)?;
        let mut zeros = Vec::new();
        let block = self.blocks.get_mut(index).ok_or(STRANGE)?;
        for page in pages {
            let state = block.states.get_mut(page as usize).ok_or(STRANGE)?;
            match state {
                State::Missing => self.requests.push_back(Request {
                    block: index,
                    pages: BlockRange::new(page, 1),
                }),
                State::There => {
                    *state = State::Given;
                    zeros.push((page, None));
                }
                State::Given => {}
            }
        }
        self.queue(index, &zeros);
        Ok(())
    }

    /// Gives QEMU pages of a block; no content means zeros. Pages that are not missing, or not any
    /// more, are left out. A call that is cancelled has given them too.
    pub async fn give(
        &mut self,
        block: usize,
        pages: &[(u64, Option<&Page>)],
    ) -> Result<(), IncomingError> {
        let mut new = Vec::with_capacity(pages.len());
        if let Some(known) = self.blocks.get_mut(block) {
            for (page, content) in pages {
                if let Some(state) = known.states.get_mut(*page as usize)
                    && *state == State::Missing
                {
                    *state = State::Given;
                    new.push((*page, *content));
                }
            }
        }
        self.missing -= new.len() as u64;
        let blocks = &self.blocks;
        self.requests.retain(|request| {
            let state = blocks
                .get(request.block)
                .and_then(|block| block.states.get(request.pages.start as usize));
            state == Some(&State::Missing)
        });
        self.queue(block, &new);
        self.flush().await
    }

    /// Appends a section with these pages to what QEMU gets.
    fn queue(&mut self, block: usize, pages: &[(u64, Option<&Page>)]) {
        if pages.is_empty() {
            return;
        }
        self.writer.section_start(false, &mut self.out);
        for (page, content) in pages {
            self.writer.page(block, *page, *content, &mut self.out);
        }
        self.writer.section_end(&mut self.out);
    }

    /// Writes what is queued. Safe to cancel.
    async fn flush(&mut self) -> Result<(), IncomingError> {
        while let Some(rest) = self.out.get(self.written..).filter(|rest| !rest.is_empty()) {
            match self.socket.write(rest).await {
                Ok(length) if length > 0 => self.written += length,
                _ => return Err(reason(&self.qmp, IncomingError::Ended).await),
            }
        }
        self.out.clear();
        self.written = 0;
        Ok(())
    }

    /// Ends the stream when every page was given, and waits until QEMU has ended its migration.
    pub async fn finish(mut self) -> Result<(), IncomingError> {
        if self.missing > 0 {
            return Err(IncomingError::Content("pages are missing"));
        }
        self.writer.section_start(true, &mut self.out);
        self.writer.section_end(&mut self.out);
        Writer::end(&mut self.out);
        self.flush().await?;
        match tokio::time::timeout(END_TIMEOUT, self.ended()).await {
            Ok(ended) => ended?,
            Err(_) => return Err(reason(&self.qmp, IncomingError::Timeout(END_TIMEOUT)).await),
        }
        // The next move of the guest begins without it.
        let off = std::iter::once((POSTCOPY, false));
        Ok(set_capabilities(&self.qmp, off).await?)
    }

    async fn ended(&mut self) -> Result<(), IncomingError> {
        loop {
            let status = self.qmp.query("query-migrate").await?;
            match status["status"].as_str() {
                Some("completed") => return Ok(()),
                Some("failed") => return Err(reason(&self.qmp, IncomingError::Ended).await),
                _ => tokio::time::sleep(POLL).await,
            }
        }
    }
}

/// Waits until QEMU has noticed that its socket broke. Returns false if it needed it no more.
async fn until_paused(qmp: &Qmp) -> Result<bool, IncomingError> {
    loop {
        let status = qmp.query("query-migrate").await?;
        match status["status"].as_str() {
            Some("postcopy-paused") => return Ok(true),
            Some("completed") => return Ok(false),
            Some("postcopy-active" | "postcopy-recover") => tokio::time::sleep(POLL).await,
            other => {
                let state = other.unwrap_or("not migrating").to_owned();
                return Err(IncomingError::State(state));
            }
        }
    }
}
