//! Tests repositories in a real S3 server (rclone), which `scripts/install lab` installs.

use crate::common::{PATIENCE, imported, stripe, wait_until};
use crate::repository;
use longhaul_image::store::{Key, S3Store, Store, StoreError};
use longhaul_image::{ImageDisk, ImageNotice, Repository, RepositoryError};
use longhaul_storage::disk::Disk;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use tempfile::TempDir;

const ACCESS: &str = "longhaul";
const SECRET: &str = "0123456789abcdef";

/// Returns the server's program; `None` where it is not installed and need not be.
fn program() -> Option<PathBuf> {
    let lab = std::env::var_os("LONGHAUL_LAB_DIR").unwrap_or("/var/lib/longhaul-lab".into());
    let path = PathBuf::from(lab).join("s3/rclone");
    if path.is_file() {
        return Some(path);
    }
    let required = std::env::var_os("LONGHAUL_LAB_REQUIRE_ALL").is_some_and(|value| value != "0");
    assert!(
        !required,
        "an S3 server is missing: sudo scripts/install lab"
    );
    eprintln!("skipped: an S3 server is missing: sudo scripts/install lab");
    None
}

/// Returns an address on this machine that stays reserved for the caller, even without a listener.
fn free_address() -> SocketAddr {
    static NEXT: AtomicU16 = AtomicU16::new(20_000);
    let [_, high, middle, low] = std::process::id().to_be_bytes();
    let host = Ipv4Addr::new(127, high, middle, low);
    (host, NEXT.fetch_add(1, Ordering::Relaxed)).into()
}

struct Server {
    child: Child,
    address: SocketAddr,
    folder: TempDir,
}

impl Server {
    fn start() -> Option<Self> {
        let program = program()?;
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("images")).unwrap();
        let address = free_address();
        let child = Self::spawn(&program, address, &folder);
        let mut server = Self {
            child,
            address,
            folder,
        };
        server.wait();
        Some(server)
    }

    fn spawn(program: &PathBuf, address: SocketAddr, folder: &TempDir) -> Child {
        Command::new(program)
            .args(["--config", "/dev/null", "serve", "s3"])
            .args(["--auth-key", &format!("{ACCESS},{SECRET}")])
            .args(["--addr", &address.to_string()])
            .arg(folder.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    }

    fn wait(&mut self) {
        wait_until(|| TcpStream::connect(self.address).is_ok());
        assert!(self.child.try_wait().unwrap().is_none(), "it has ended");
    }

    fn end(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    fn restart(&mut self) {
        self.child = Self::spawn(&program().unwrap(), self.address, &self.folder);
        self.wait();
    }

    /// Keeps the server from removing the folders of a prefix: it removes a folder with its last
    /// object, and then for a while does not know an object that is put there meanwhile.
    fn keep_folders(&self, prefix: &str) {
        let prefix = self.folder.path().join("images").join(prefix);
        let stripes = (0..=u8::MAX).map(|first| format!("stripes/{first:02x}"));
        for folder in stripes.chain(["images", "names", "markers"].map(str::to_owned)) {
            let folder = prefix.join(folder);
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("keep"), "").unwrap();
        }
    }

    fn store_with(&self, place: &str, secret: &str) -> Arc<dyn Store> {
        let endpoint = format!("http://{}", self.address);
        let store = S3Store::at(place.parse().unwrap(), &endpoint, ACCESS, secret);
        Arc::new(store.unwrap())
    }

    fn store(&self, place: &str) -> Arc<dyn Store> {
        self.store_with(place, SECRET)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn repositories_in_s3_are_as_in_folders() {
    let Some(server) = Server::start() else {
        return;
    };
    repository::images_come_and_go(&server.store("s3://images"));
    repository::damage_is_found_and_mended(&server.store("s3://images/a"));
    repository::an_import_that_was_overruled_says_so(&server.store("s3://images/a/b"));
    server.keep_folders("c");
    repository::removals_and_imports_meet(&server.store("s3://images/c"), 5);
}

#[test]
fn what_is_wrong_with_a_bucket_is_said() {
    let Some(server) = Server::start() else {
        return;
    };
    let error = Repository::open(server.store_with("s3://images", "wrong")).unwrap_err();
    assert!(
        matches!(error, RepositoryError::Store(StoreError::Refused { .. })),
        "{error}"
    );
    let error = Repository::open_or_make(server.store("s3://none")).unwrap_err();
    assert!(error.to_string().contains("no such bucket"), "{error}");
    let store = server.store("s3://images");
    Repository::open_or_make(store.clone()).unwrap();
    let error = store.get(&Key::Format, 5).unwrap_err();
    assert!(matches!(error, StoreError::TooLong { .. }), "{error}");
}

#[test]
fn a_disk_waits_for_a_server_that_is_started_again() {
    let Some(mut server) = Server::start() else {
        return;
    };
    let store = server.store("s3://images/d");
    let repository = Repository::open_or_make(store).unwrap();
    let id = imported(&repository, "ab").id;
    let notices = Arc::new(Mutex::new(Vec::new()));
    let told = notices.clone();
    let notify = move |notice| told.lock().unwrap().push(notice);
    let folder = tempfile::tempdir().unwrap();
    let disk = ImageDisk::open(repository, id, folder.path(), PATIENCE, notify).unwrap();
    let mut buffer = [0; 4];
    disk.read(0, &mut buffer).unwrap();
    assert_eq!(buffer, stripe(b'a')[..4]);
    server.end();
    thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut buffer = [0; 4];
            disk.read(1 << 18, &mut buffer).unwrap();
            buffer
        });
        wait_until(|| !notices.lock().unwrap().is_empty());
        server.restart();
        assert_eq!(reader.join().unwrap(), stripe(b'b')[..4]);
    });
    assert_eq!(notices.lock().unwrap().last(), Some(&ImageNotice::Back));
}
