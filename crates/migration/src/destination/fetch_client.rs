//! The agent's connection to the disk export of an arrived guest: it carries missing blocks to the
//! export's server, and the server's messages back.

use longhaul_protocol::{BlockRange, RegionId};
use longhaul_storage::front::FrontFolder;
use longhaul_storage::front::arriving::line::{BLOCKS_MAX, MESSAGE_BYTES, ToPump, ToServer};
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;
use tokio::sync::mpsc;

/// Time limit for a server to take or answer a message. After it the owner drops the connection;
/// the server's supervisor is responsible for the server.
const PATIENCE: Duration = Duration::from_secs(60);

/// A message of a server.
#[derive(Debug, Clone, Copy)]
pub(crate) struct News {
    pub(crate) region: RegionId,
    /// The number of the connection; the owner ignores messages of earlier ones.
    pub(crate) number: u64,
    /// The message; `None` if the server is gone.
    pub(crate) said: Option<ToPump>,
}

/// A connection to the server of one disk.
pub(crate) struct FetchClient {
    stream: UnixStream,
    /// Held while a message is written: blocks come from the receiver of the source's frames, and
    /// other messages from the owner.
    writing: Mutex<()>,
    barriers: Mutex<Barriers>,
    changed: Condvar,
}

#[derive(Default)]
struct Barriers {
    asked: u64,
    reached: u64,
    failed: Option<i32>,
    gone: bool,
}

impl FetchClient {
    /// Connects to a server. Its messages arrive in `news`, which must be received.
    pub(crate) fn connect(
        folder: &FrontFolder,
        (region, number): (RegionId, u64),
        news: mpsc::Sender<News>,
    ) -> io::Result<Arc<Self>> {
        let stream = UnixStream::connect(folder.pump())?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let puller = Arc::new(Self {
            stream: stream.try_clone()?,
            writing: Mutex::default(),
            barriers: Mutex::default(),
            changed: Condvar::new(),
        });
        let hearing = Arc::downgrade(&puller);
        let hear = move || {
            let tell = |said| {
                let news = news.blocking_send(News {
                    region,
                    number,
                    said,
                });
                news.is_ok()
            };
            let mut bytes = [0; MESSAGE_BYTES];
            while (&stream).read_exact(&mut bytes).is_ok() {
                let Ok(said) = ToPump::from_bytes(&bytes) else {
                    break;
                };
                let Some(puller) = hearing.upgrade() else {
                    return;
                };
                puller.heard(said);
                if !matches!(said, ToPump::Reached(_)) && !tell(Some(said)) {
                    break;
                }
            }
            if let Some(puller) = hearing.upgrade() {
                puller.end();
            }
            tell(None);
        };
        thread::Builder::new()
            .name("puller".to_owned())
            .spawn(hear)?;
        Ok(puller)
    }

    fn lock(&self) -> MutexGuard<'_, Barriers> {
        self.barriers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn heard(&self, said: ToPump) {
        let mut barriers = self.lock();
        match said {
            ToPump::Reached(number) => barriers.reached = number,
            ToPump::Failed(errno) => barriers.failed = Some(errno),
            _ => return,
        }
        drop(barriers);
        self.changed.notify_all();
    }

    /// Ends the connection.
    pub(crate) fn end(&self) {
        self.lock().gone = true;
        self.changed.notify_all();
        // The socket may be closed already.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    fn say(&self, message: ToServer, content: &[u8]) -> io::Result<()> {
        let writing = self.writing.lock();
        let _writing = writing.unwrap_or_else(PoisonError::into_inner);
        let mut stream = &self.stream;
        let said = stream.write_all(&message.to_bytes());
        let said = said.and_then(|()| stream.write_all(content));
        if said.is_err() {
            // A part of the message may have been written: nothing can follow it.
            self.end();
        }
        said
    }

    /// Reports that the file of masks is written.
    pub(crate) fn listed(&self) -> io::Result<()> {
        self.say(ToServer::Listed, &[])?;
        self.settle()
    }

    /// Sends blocks to the server; zeros if there is no content.
    pub(crate) fn bring(&self, range: BlockRange, content: Option<&[u8]>) -> io::Result<()> {
        let block = longhaul_protocol::BLOCK_SIZE;
        let mut start = range.start;
        while start < range.end() {
            let count = (range.end() - start).min(BLOCKS_MAX);
            let piece = BlockRange::new(start, count);
            let from = (start - range.start) as usize * block;
            match content {
                None => self.say(ToServer::Zeros(piece), &[])?,
                Some(content) => {
                    let content = content.get(from..from + count as usize * block);
                    let content = content.ok_or_else(|| io::Error::other("too little content"))?;
                    self.say(ToServer::Blocks(piece), content)?;
                }
            }
            start += count;
        }
        Ok(())
    }

    /// Reports that the source cannot read these blocks.
    pub(crate) fn unreadable(&self, range: BlockRange) -> io::Result<()> {
        self.say(ToServer::Unreadable(range), &[])
    }

    /// Waits until all blocks sent before are on the disk and recorded.
    pub(crate) fn settle(&self) -> io::Result<()> {
        let asked = {
            let mut barriers = self.lock();
            barriers.asked += 1;
            barriers.asked
        };
        self.say(ToServer::Barrier(asked), &[])?;
        let waits = |barriers: &mut Barriers| {
            barriers.reached < asked && barriers.failed.is_none() && !barriers.gone
        };
        let waited = self
            .changed
            .wait_timeout_while(self.lock(), PATIENCE, waits);
        let (barriers, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match barriers.failed {
            Some(errno) => Err(io::Error::from_raw_os_error(errno)),
            None if barriers.reached >= asked => Ok(()),
            None => Err(io::Error::other("its export does not answer")),
        }
    }
}

impl Drop for FetchClient {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use longhaul_protocol::BLOCK_SIZE;
    use std::os::unix::net::UnixListener;

    /// Content with a part of another message in it would be another content of the guest's disk.
    #[test]
    fn messages_of_two_threads_do_not_mix() {
        const BLOCKS: u64 = 2000;
        let root = tempfile::tempdir().unwrap();
        let folder = FrontFolder::open(root.path());
        std::fs::create_dir_all(folder.pump().parent().unwrap()).unwrap();
        let listener = UnixListener::bind(folder.pump()).unwrap();
        let news = mpsc::channel(1).0;
        let client = FetchClient::connect(&folder, (RegionId(1), 1), news).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        let content_of = |block: u64| vec![block as u8; BLOCK_SIZE];
        thread::scope(|scope| {
            scope.spawn(|| {
                for block in 0..BLOCKS {
                    let range = BlockRange::new(block, 1);
                    client.bring(range, Some(&content_of(block))).unwrap();
                }
            });
            scope.spawn(|| {
                for block in 0..BLOCKS {
                    let range = BlockRange::new(block, 1);
                    client.unreadable(range).unwrap();
                }
            });
            let (mut brought, mut unreadable) = (0, 0);
            while (brought, unreadable) != (BLOCKS, BLOCKS) {
                let mut bytes = [0; MESSAGE_BYTES];
                server.read_exact(&mut bytes).unwrap();
                let message = ToServer::from_bytes(&bytes).unwrap();
                let mut content = vec![0; message.content_bytes()];
                server.read_exact(&mut content).unwrap();
                match message {
                    ToServer::Blocks(range) => {
                        assert_eq!(range, BlockRange::new(brought, 1));
                        assert!(content == content_of(brought), "block {brought}");
                        brought += 1;
                    }
                    ToServer::Unreadable(range) => {
                        assert_eq!(range, BlockRange::new(unreadable, 1));
                        unreadable += 1;
                    }
                    other => panic!("{other:?}"),
                }
            }
        });
    }
}
