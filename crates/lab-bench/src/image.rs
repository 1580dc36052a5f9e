//! Builds the disk of the `debian` guest from Debian's packages, once for each version of the
//! recipe.

use longhaul_lab::error::{During, LabError};
use longhaul_lab::installed;
use longhaul_lab::interrupt;
use longhaul_lab::lab::say;
use nix::fcntl::{Flock, FlockArg};
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

/// The recipe.
const BUILD: &str = include_str!("../debian/build");
/// The files in the guest beside Debian's packages, under /lab.
const FILES: [(&str, &str); 14] = [
    ("init", include_str!("../debian/guest/init")),
    ("churn.lisp", include_str!("../debian/guest/churn.lisp")),
    ("database", include_str!("../debian/guest/database")),
    ("database.sql", include_str!("../debian/guest/database.sql")),
    (
        "make-database",
        include_str!("../debian/guest/make-database"),
    ),
    (
        "shop/nginx.conf",
        include_str!("../debian/guest/shop/nginx.conf"),
    ),
    (
        "shop/php-fpm.conf",
        include_str!("../debian/guest/shop/php-fpm.conf"),
    ),
    (
        "shop/shop.php",
        include_str!("../debian/guest/shop/shop.php"),
    ),
    (
        "shop/shop.sql",
        include_str!("../debian/guest/shop/shop.sql"),
    ),
    (
        "transaction.sql",
        include_str!("../debian/guest/transaction.sql"),
    ),
    (
        "workloads/churn",
        include_str!("../debian/guest/workloads/churn"),
    ),
    (
        "workloads/compile",
        include_str!("../debian/guest/workloads/compile"),
    ),
    (
        "workloads/database",
        include_str!("../debian/guest/workloads/database"),
    ),
    (
        "workloads/web",
        include_str!("../debian/guest/workloads/web"),
    ),
];
/// The programs that the recipe uses, and their packages.
const PROGRAMS: [(&str, &str); 3] = [
    ("debootstrap", "debootstrap"),
    ("mke2fs", "e2fsprogs"),
    ("unshare", "util-linux"),
];

/// Returns a short key that identifies these parts.
pub(crate) fn key<T: AsRef<[u8]>>(parts: &[T]) -> String {
    let mut hasher = DefaultHasher::new();
    for part in parts {
        part.as_ref().hash(&mut hasher);
    }
    format!("{:016x}", hasher.finish())
}

/// Returns the folder with the parts of guests with a disk.
///
/// # Errors
/// When it cannot be made.
pub(crate) fn folder() -> Result<PathBuf, LabError> {
    let folder = installed::folder().join("guests");
    fs::create_dir_all(&folder)
        .during(|| format!("make {} (hint: run as root)", folder.display()))?;
    Ok(folder)
}

/// Locks the folder of guests while a part is created: two benches create it once.
///
/// # Errors
/// When the lock cannot be had.
pub(crate) fn hold() -> Result<Flock<File>, LabError> {
    let path = folder()?.join("lock");
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path)
        .during(|| format!("open {}", path.display()))?;
    Flock::lock(file, FlockArg::LockExclusive)
        .map_err(|(_, error)| error)
        .during(|| format!("lock {}", path.display()))
}

/// Returns the key of the disk: another recipe makes another disk.
pub(crate) fn recipe() -> String {
    let mut parts = vec![BUILD];
    for (name, content) in FILES {
        parts.extend([name, content]);
    }
    key(&parts)
}

/// Returns the disk of the `debian` guest, building it if it does not exist.
///
/// # Errors
/// When it cannot be built; the recipe's output is part of the error.
pub(crate) fn debian() -> Result<PathBuf, LabError> {
    let whole = folder()?.join(format!("debian-{}", recipe()));
    let disk = whole.join("disk.img");
    let _held = hold()?;
    if disk.is_file() {
        return Ok(disk);
    }
    for (program, package) in PROGRAMS {
        require(program, package)?;
    }
    let began = Instant::now();
    say("building the guest debian: once, about 2 minutes and 100 MB of packages");
    let files = write_files(&whole.with_extension("files"))?;
    let made = whole.with_extension("new");
    let built = build(&made, &files);
    fs::remove_dir_all(&files).during(|| format!("remove {}", files.display()))?;
    built?;
    fs::rename(&made, &whole).during(|| format!("make {}", whole.display()))?;
    say(&format!(
        "built {} in {:.0} s",
        disk.display(),
        began.elapsed().as_secs_f64()
    ));
    Ok(disk)
}

fn require(program: &str, package: &str) -> Result<(), LabError> {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let there = std::env::split_paths(&folders)
        .chain([PathBuf::from("/usr/sbin"), PathBuf::from("/sbin")])
        .any(|folder| folder.join(program).is_file());
    if there {
        return Ok(());
    }
    Err(LabError::Missing {
        what: format!("{program} (Debian package {package}), which builds the guest debian"),
        hint: "sudo scripts/install lab".to_owned(),
    })
}

fn write_files(folder: &Path) -> Result<PathBuf, LabError> {
    for (name, content) in FILES {
        let path = folder.join(name);
        let parent = path.parent().unwrap_or(folder);
        fs::create_dir_all(parent)
            .and_then(|()| fs::write(&path, content))
            .during(|| format!("write {}", path.display()))?;
    }
    Ok(folder.to_owned())
}

/// Runs the recipe in a mount namespace, so that its mounts end with it.
fn build(into: &Path, files: &Path) -> Result<(), LabError> {
    let path = std::env::var("PATH").unwrap_or_default();
    let mut recipe = Command::new("unshare")
        .args(["--mount", "sh", "-c", BUILD, "build"])
        .args([into, files])
        .env("PATH", format!("{path}:/usr/sbin:/sbin"))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .during(|| "build the guest debian".to_owned())?;
    if let Some(stdout) = recipe.stdout.take() {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            say(&format!("  {line}"));
        }
    }
    let mut message = String::new();
    if let Some(mut stderr) = recipe.stderr.take() {
        stderr
            .read_to_string(&mut message)
            .during(|| "read what the build of the guest debian says".to_owned())?;
    }
    let status = recipe
        .wait()
        .during(|| "wait for the build of the guest debian".to_owned())?;
    interrupt::check()?;
    if status.success() {
        return Ok(());
    }
    Err(LabError::Command {
        command: "crates/lab-bench/debian/build".to_owned(),
        message: format!("{status}: {} (logs in {})", message.trim(), into.display()),
    })
}
