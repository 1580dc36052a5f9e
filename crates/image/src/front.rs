//! The export of an incomplete base image: stripes that a guest reads are fetched first, all others
//! in the background, and in the end the image's file is marked as complete
//! ([`crate::Bases::whole`]). Then the owner gives QEMU the file instead.
//!
//! Its knowledge is in the file itself, so it may be killed at any time. A read of a missing stripe
//! waits while the repository is unreachable, and fails if the stripe is damaged or gone there; the
//! download is then tried again.

use crate::bases::Bases;
use crate::disk::{Fetched, ImageDisk, ImageNotice, Order};
use crate::manifest::STRIPE_BYTES;
use crate::repository::Repository;
use crate::store::Place;
use longhaul_storage::disk::{Disk, Extent, RawDisk, Zeros};
use longhaul_storage::front::{FrontFolder, ServeError, serve};
use longhaul_storage::nbd::{Export, Notice, others_go_on};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, SystemTime};

/// Limit on the wait for a repository: as long as there are guests.
const PATIENCE: Duration = Duration::from_secs(1 << 32);
/// How often it reports its progress, and checks for a new order.
const TELL_EVERY: Duration = Duration::from_millis(500);
/// The time until a failed fetch or a failed write is tried again.
const AGAIN_EVERY: Duration = Duration::from_secs(5);
/// Longest file of an order: each stripe of the longest image once.
const ORDER_BYTES_MAX: u64 = 16 << 20;
/// Longest file of a report.
const TOLD_BYTES_MAX: u64 = 64 << 10;
/// Longest error text in a report.
const TROUBLE_CHARS_MAX: usize = 300;

/// Prefixes of the environment variables that repositories need.
const ENVIRONMENT: [&str; 2] = ["AWS_", "SSL_CERT_"];

/// Returns the variables of this process's environment that a repository may need.
pub fn environment() -> BTreeMap<String, String> {
    let needed = |name: &str| ENVIRONMENT.iter().any(|begin| name.starts_with(begin));
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .filter(|(name, _)| needed(name))
        .collect()
}

/// The progress of an image.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Told {
    /// Its content other than zeros, in bytes.
    pub content_bytes: u64,
    /// How much of that is known to be here.
    pub here_bytes: u64,
    /// How much was read from the repository, by earlier servers as well.
    pub read_bytes: u64,
    /// Reads that wait for missing stripes.
    pub waiting: usize,
    /// The cause that keeps it from being completed.
    pub trouble: Option<String>,
}

/// Returns the last report of a folder's server.
pub fn told(folder: &FrontFolder) -> Option<Told> {
    let mut text = Vec::new();
    let file = File::open(folder.told()).ok()?;
    file.take(TOLD_BYTES_MAX).read_to_end(&mut text).ok()?;
    serde_json::from_slice(&text).ok()
}

/// Sets the order for a folder's server.
pub fn say_order(folder: &FrontFolder, hottest: &[u32]) -> io::Result<()> {
    let bytes: Vec<u8> = hottest.iter().flat_map(|at| at.to_le_bytes()).collect();
    put(&folder.order(), &bytes)
}

/// Writes a whole file atomically. It need not outlive the host.
fn put(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let new = path.with_extension("new");
    fs::write(&new, bytes)?;
    fs::rename(&new, path)
}

/// Reads an order; an invalid file counts as empty.
fn read_order(path: &Path) -> io::Result<Vec<u32>> {
    let mut bytes = Vec::new();
    let file = File::open(path)?;
    file.take(ORDER_BYTES_MAX).read_to_end(&mut bytes)?;
    let (stripes, _) = bytes.as_chunks::<4>();
    Ok(stripes.iter().map(|at| u32::from_le_bytes(*at)).collect())
}

/// A reason why an image cannot be exported.
#[derive(Debug, thiserror::Error)]
enum Unshown {
    #[error("its folder does not say where it comes from")]
    NoRepository,
    #[error("{0} is not the file of a base image")]
    NoImage(String),
}

fn unshown(error: impl std::error::Error + Send + Sync + 'static) -> ServeError {
    ServeError::Disk(Box::new(error))
}

/// Exports a base image, in a process that a supervisor has started, and fetches it.
pub fn base(
    folder: &FrontFolder,
    notify: impl Fn(Notice) + Send + Sync + 'static,
    trouble: impl Fn(&ImageNotice) + Send + Sync + 'static,
) -> Result<(), ServeError> {
    let spec = folder.spec()?;
    let no_image = || unshown(Unshown::NoImage(spec.image.display().to_string()));
    let from = spec.fetched.as_ref();
    let from = from.ok_or_else(|| unshown(Unshown::NoRepository))?;
    let id = Bases::named(&spec.image).ok_or_else(no_image)?;
    let bases = Bases::new(spec.image.parent().ok_or_else(no_image)?);
    let place: Place = from.repository.parse().map_err(unshown)?;
    let open = || -> Result<Export, ServeError> {
        let name = spec.name.clone();
        if bases.whole(id).map_err(unshown)?.is_some() {
            let disk = Arc::new(RawDisk::open_to_read(&spec.image)?);
            return Ok(Export { name, disk });
        }
        let store = place.store().map_err(unshown)?;
        let state = Arc::new(State {
            before: told(folder).unwrap_or_default().read_bytes,
            trouble: Mutex::default(),
            is_full: AtomicBool::new(false),
            order: Order::default(),
        });
        let heard = state.clone();
        let notify = move |notice| {
            trouble(&notice);
            heard.hear(notice);
        };
        let disk = bases.open(Repository::known(store), id, PATIENCE, notify);
        let disk = Arc::new(disk.map_err(unshown)?);
        state.begin(folder, &disk).map_err(unshown)?;
        let disk = Arc::new(ComingDisk(disk));
        Ok(Export { name, disk })
    };
    serve(folder, open, notify)
}

/// The server's state besides its disk.
struct State {
    /// How much earlier servers have read from the repository, in bytes.
    before: u64,
    trouble: Mutex<Option<String>>,
    /// Whether fetched stripes cannot be stored.
    is_full: AtomicBool,
    order: Order,
}

impl State {
    fn hear(&self, notice: ImageNotice) {
        let text = match notice {
            ImageNotice::Away { reason } => Some(reason),
            ImageNotice::Back => None,
            ImageNotice::Failed { offset, reason } => Some(format!("at byte {offset}: {reason}")),
            ImageNotice::NotKept { reason } => {
                self.is_full.store(true, Ordering::Release);
                Some(format!("what comes cannot be kept: {reason}"))
            }
        };
        self.say(text);
    }

    fn say(&self, trouble: Option<String>) {
        let short = |text: String| text.chars().take(TROUBLE_CHARS_MAX).collect();
        *self.trouble.lock().unwrap_or_else(PoisonError::into_inner) = trouble.map(short);
    }

    /// Begins to fetch, and to report the progress.
    fn begin(self: &Arc<Self>, folder: &FrontFolder, disk: &Arc<ImageDisk>) -> io::Result<()> {
        let mut ordered = None;
        self.take_order(folder, &mut ordered);
        let (state, bringing) = (self.clone(), disk.clone());
        let named = |name: &str| thread::Builder::new().name(name.to_owned());
        named("base-bring").spawn(move || state.bring(&bringing))?;
        let (state, folder, disk) = (self.clone(), folder.clone(), disk.clone());
        named("base-tell").spawn(move || {
            let mut said = None;
            loop {
                let now = state.told(&disk);
                // If the report cannot be written, the last one stays readable.
                if said.as_ref() != Some(&now)
                    && let Ok(text) = serde_json::to_vec(&now)
                    && put(&folder.told(), &text).is_ok()
                {
                    said = Some(now);
                }
                thread::sleep(TELL_EVERY);
                state.take_order(&folder, &mut ordered);
            }
        })?;
        Ok(())
    }

    /// Takes a new order, if there is one.
    fn take_order(&self, folder: &FrontFolder, known: &mut Option<SystemTime>) {
        let path = folder.order();
        let changed = fs::metadata(&path).and_then(|file| file.modified()).ok();
        if changed.is_some()
            && changed != *known
            && let Ok(hottest) = read_order(&path)
        {
            self.order.set(&hottest);
            *known = changed;
        }
    }

    fn told(&self, disk: &ImageDisk) -> Told {
        let content_bytes = disk.manifest().stored_bytes();
        let missing = u64::from(disk.missing()) * STRIPE_BYTES;
        let trouble = self.trouble.lock().unwrap_or_else(PoisonError::into_inner);
        Told {
            content_bytes,
            here_bytes: content_bytes.saturating_sub(missing),
            read_bytes: self.before + disk.read_bytes(),
            waiting: disk.waiting(),
            trouble: trouble.clone(),
        }
    }

    /// Fetches the whole image, however long that takes.
    fn bring(&self, disk: &ImageDisk) {
        loop {
            let has_room = || !self.is_full.load(Ordering::Acquire);
            match disk.fetch_while(&self.order, has_room) {
                Ok(Fetched::All) => match disk.seal() {
                    Ok(()) => return self.say(None),
                    Err(error) => self.say(Some(error.to_string())),
                },
                Ok(Fetched::Failed(_)) => {}
                Ok(Fetched::Ended) => return,
                Err(error) => self.say(Some(error.to_string())),
            }
            thread::sleep(AGAIN_EVERY);
            self.is_full.store(false, Ordering::Release);
        }
    }
}

/// A disk whose waiting reads let other requests proceed.
#[derive(Debug)]
struct ComingDisk(Arc<ImageDisk>);

impl Disk for ComingDisk {
    fn size_bytes(&self) -> u64 {
        self.0.size_bytes()
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let end = offset.saturating_add(buffer.len() as u64);
        match self.0.has(offset..end) {
            true => self.0.read(offset, buffer),
            false => others_go_on(|| self.0.read(offset, buffer)),
        }
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.0.write(offset, bytes)
    }

    fn flush(&self) -> io::Result<()> {
        self.0.flush()
    }

    fn zero(&self, range: Range<u64>, zeros: Zeros) -> io::Result<()> {
        self.0.zero(range, zeros)
    }

    fn discard(&self, range: Range<u64>) -> io::Result<()> {
        self.0.discard(range)
    }

    fn extents(&self, range: Range<u64>, count_max: usize) -> io::Result<Vec<Extent>> {
        self.0.extents(range, count_max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use longhaul_storage::disk::ExportSize;
    use longhaul_storage::front::FrontSpec;
    use longhaul_storage::nbd::ExportName;

    fn folder(above: &Path) -> FrontFolder {
        let spec = FrontSpec {
            image: "/bases/x.raw".into(),
            size: ExportSize::OfFile,
            locks: None,
            name: ExportName::new("0123456789abcdef".repeat(2)).unwrap(),
            qemu_uid: None,
            arriving: false,
            tracked: false,
            fetched: None,
            socket: None,
        };
        FrontFolder::create(&above.join("base"), &spec).unwrap()
    }

    fn state() -> Arc<State> {
        Arc::new(State {
            before: 0,
            trouble: Mutex::default(),
            is_full: AtomicBool::new(false),
            order: Order::default(),
        })
    }

    #[test]
    fn what_is_said_to_a_server_and_by_it_is_read_and_nothing_else() {
        let above = tempfile::tempdir().unwrap();
        let folder = folder(above.path());
        let (state, mut known) = (state(), None);
        state.take_order(&folder, &mut known);
        assert_eq!((state.order.hottest(), known), (Vec::new(), None));
        say_order(&folder, &[7, 3, 9]).unwrap();
        state.take_order(&folder, &mut known);
        assert_eq!(state.order.hottest(), [7, 3, 9]);
        // The last entry is incomplete.
        fs::write(folder.order(), [1, 0, 0, 0, 2, 0]).unwrap();
        assert_eq!(read_order(&folder.order()).unwrap(), [1]);

        assert_eq!(told(&folder), None);
        let said = Told {
            content_bytes: 5,
            ..Told::default()
        };
        put(&folder.told(), &serde_json::to_vec(&said).unwrap()).unwrap();
        assert_eq!(told(&folder), Some(said));
        for wrong in [&b"{"[..], b"{\"other\":1}", &[b' '; 100 << 10]] {
            put(&folder.told(), wrong).unwrap();
            assert_eq!(told(&folder), None);
        }
    }

    #[test]
    fn what_keeps_an_image_from_coming_is_told_until_it_is_over() {
        let state = state();
        let trouble = || state.trouble.lock().unwrap().clone().unwrap_or_default();
        let reason = || "x".repeat(2 * TROUBLE_CHARS_MAX);
        let failed = ImageNotice::Failed {
            offset: 262_144,
            reason: reason(),
        };
        state.hear(failed);
        assert!(trouble().starts_with("at byte 262144: x"), "{}", trouble());
        assert_eq!(trouble().len(), TROUBLE_CHARS_MAX);
        state.hear(ImageNotice::Away { reason: reason() });
        assert!(trouble().starts_with("xx"));
        state.hear(ImageNotice::Back);
        assert_eq!(trouble(), "");
        assert!(!state.is_full.load(Ordering::Acquire));
        state.hear(ImageNotice::NotKept { reason: reason() });
        assert!(trouble().contains("cannot be kept"));
        assert!(state.is_full.load(Ordering::Acquire));
    }
}
