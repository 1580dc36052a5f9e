//! Tests `longhaul image` on a repository in a folder, word for word.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{check, free_address, longhaul};
use longhaul_storage::disk::{ImageLock, ImageUse};
use serde_json::Value;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

struct Setting {
    folder: TempDir,
}

impl Setting {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().join("state");
        let text = format!("state = {state:?}\n");
        fs::write(folder.path().join("agent.toml"), text).unwrap();
        Self { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns a disk of 8 MiB with 2 MiB of content, all stripes different, and one word of its
    /// own.
    fn disk(&self, name: &str, word: &str) -> PathBuf {
        let path = self.path(name);
        let file = File::create(&path).unwrap();
        file.set_len(8 << 20).unwrap();
        for (number, offset) in [(0, 0), (1, 4 << 20)] {
            let page = |place: u32| place / 4096 + 32 * number;
            let content: Vec<u8> = (0..1 << 20)
                .map(|place| (page(place) % 251) as u8 + 1)
                .collect();
            file.write_all_at(&content, offset).unwrap();
        }
        file.write_all_at(word.as_bytes(), 7 << 20).unwrap();
        path
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let config = self.path("agent.toml").display().to_string();
        let arguments = [&["image"], arguments, &["--config", &config]].concat();
        longhaul(&self.path("none"), &arguments)
    }

    fn check(&self, name: &str, arguments: &[&str]) {
        let output = self.run(arguments);
        let shown = [&["image"], arguments].concat();
        check(
            &format!("image_{name}"),
            &shown,
            &output,
            self.folder.path(),
        );
    }

    fn json(&self, arguments: &[&str]) -> Value {
        let output = self.run(&[arguments, &["--json"]].concat());
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Returns the file of some stripe.
    fn stripe(&self) -> PathBuf {
        let names = |folder: &Path| {
            let entries = fs::read_dir(folder).unwrap();
            entries
                .map(|entry| entry.unwrap().path())
                .collect::<Vec<_>>()
        };
        let folders = names(&self.path("state/repository/stripes"));
        let mut stripes: Vec<_> = folders.iter().flat_map(|folder| names(folder)).collect();
        stripes.sort();
        stripes.remove(0)
    }
}

#[test]
fn images_are_imported_listed_verified_and_removed() {
    let setting = Setting::new();
    let disk = setting.disk("debian.raw", "one").display().to_string();
    let other = setting.disk("web.raw", "other").display().to_string();
    setting.check("none", &["list"]);
    setting.check("import", &["import", &disk, "--name", "debian-12"]);
    setting.check("import_again", &["import", &disk]);
    setting.check("import_other", &["import", &other]);
    setting.check("import_taken", &["import", &other, "--name", "debian-12"]);
    setting.check("list", &["list"]);
    setting.check("verify", &["verify"]);
    setting.check("unknown", &["verify", "fedora"]);
    setting.check("fetch", &["fetch", "debian-12"]);
    setting.check("fetch_again", &["fetch", "debian-12"]);
    let fetched = setting.json(&["fetch", "debian-12"]);
    let base = PathBuf::from(fetched["path"].as_str().unwrap());
    assert!(fs::read(&base).unwrap() == fs::read(&disk).unwrap());
    let list = setting.json(&["list"]);
    assert_eq!(list["images"][0]["names"][0], "debian-12");
    assert_eq!(list["images"][0]["size_bytes"], 8 << 20);
    assert_eq!(list["images"][1]["names"], Value::Array(Vec::new()));

    let stripe = setting.stripe();
    fs::write(&stripe, "damaged").unwrap();
    setting.check("verify_damaged", &["verify", "debian-12"]);
    let verified = setting.json(&["verify", "debian-12"]);
    assert_eq!(verified["images"][0]["good"], false);
    fs::remove_file(&base).unwrap();
    setting.check("fetch_damaged", &["fetch", "debian-12"]);
    setting.check("import_rewrite", &["import", "--rewrite", &disk]);
    setting.check("verify_mended", &["verify", "debian-12"]);

    setting.check("remove", &["remove", "debian-12"]);
    let left = list["images"][1]["id"].as_str().unwrap().to_owned();
    assert_eq!(setting.json(&["verify"])["images"][0]["good"], true);
    setting.check("remove_last", &["remove", &left[..8]]);
    setting.check("list_none", &["list"]);
}

#[test]
fn a_repository_is_named_by_the_configuration_or_the_command() {
    let setting = Setting::new();
    let disk = setting.disk("disk.img", "one").display().to_string();
    let named = setting.path("elsewhere").display().to_string();
    let config = format!("repository = {named:?}\n");
    fs::write(setting.path("agent.toml"), config).unwrap();
    let id = setting.json(&["import", &disk])["id"].clone();
    assert!(
        setting
            .path("elsewhere/images")
            .join(id.as_str().unwrap())
            .exists()
    );
    let listed = setting.json(&["list", "--repository", &named]);
    assert_eq!(listed["images"][0]["id"], id);
    setting.check("wrong_place", &["list", "--repository", "ftp://images"]);
    let s3 = setting.run(&["list", "--repository", "s3://images"]);
    let said = String::from_utf8(s3.stderr).unwrap();
    assert!(
        said.contains("hint: the service is taken from AWS_ENDPOINT_URL"),
        "{said}"
    );
}

/// A server process and its address.
struct Service {
    child: Child,
    endpoint: String,
}

impl Drop for Service {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns a real S3 server with TLS; `None` where it is not installed and need not be.
fn service(folder: &Path) -> Option<Service> {
    let lab = std::env::var_os("LONGHAUL_LAB_DIR").unwrap_or("/var/lib/longhaul-lab".into());
    let program = PathBuf::from(lab).join("s3/rclone");
    if !program.is_file() {
        let required = std::env::var_os("LONGHAUL_LAB_REQUIRE_ALL");
        let required = required.is_some_and(|value| value != "0");
        assert!(
            !required,
            "an S3 server is missing: sudo scripts/install lab"
        );
        return None;
    }
    let address = free_address();
    let (host, _) = address.split_once(':').unwrap();
    let made = rcgen::generate_simple_self_signed([host.to_owned()]).unwrap();
    fs::write(folder.join("cert.pem"), made.cert.pem()).unwrap();
    fs::write(folder.join("key.pem"), made.signing_key.serialize_pem()).unwrap();
    fs::create_dir_all(folder.join("service/images")).unwrap();
    let child = Command::new(program)
        .args(["--config", "/dev/null", "serve", "s3"])
        .args(["--auth-key", "longhaul,0123456789", "--addr", &address])
        .arg("--cert")
        .arg(folder.join("cert.pem"))
        .arg("--key")
        .arg(folder.join("key.pem"))
        .arg(folder.join("service"))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let deadline = Instant::now() + common::LIMIT;
    while std::net::TcpStream::connect(&address).is_err() {
        assert!(Instant::now() < deadline, "no S3 server");
        std::thread::sleep(Duration::from_millis(10));
    }
    let endpoint = format!("https://{address}");
    Some(Service { child, endpoint })
}

#[test]
fn images_are_kept_in_a_service_with_tls() {
    let setting = Setting::new();
    let disk = setting.disk("disk.raw", "one").display().to_string();
    let Some(service) = service(setting.folder.path()) else {
        eprintln!("skipped: an S3 server is missing: sudo scripts/install lab");
        return;
    };
    let run = |arguments: &[&str], certificate: &Path, secret: &str| {
        common::command(&setting.path("none"))
            .args(["image", "--repository", "s3://images/lyon"])
            .args(arguments)
            .env("AWS_ACCESS_KEY_ID", "longhaul")
            .env("AWS_SECRET_ACCESS_KEY", secret)
            .env("AWS_ENDPOINT_URL", &service.endpoint)
            .env("SSL_CERT_FILE", certificate)
            .output()
            .unwrap()
    };
    let certificate = setting.path("cert.pem");
    let succeed = |arguments: &[&str]| {
        let output = run(arguments, &certificate, "0123456789");
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{arguments:?}: {errors}");
    };
    let fail = |certificate: &Path, secret: &str| {
        let output = run(&["list"], certificate, secret);
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8(output.stderr).unwrap()
    };
    succeed(&["import", &disk, "--name", "debian-12"]);
    succeed(&["verify", "debian-12"]);
    let said = fail(&certificate, "wrong");
    assert!(said.contains("(SignatureDoesNotMatch)"), "{said}");
    assert!(said.contains("hint: the account is taken from"), "{said}");
    // A certificate of an untrusted issuer.
    let other = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    let path = setting.path("other.pem");
    fs::write(&path, other.cert.pem()).unwrap();
    let said = fail(&path, "0123456789");
    assert!(said.contains("certificate"), "{said}");
    succeed(&["remove", "debian-12"]);
}

#[test]
fn qcow2_is_the_same_image_as_raw() {
    let setting = Setting::new();
    let raw = setting.disk("disk.raw", "one").display().to_string();
    let qcow2 = setting.path("disk.qcow2").display().to_string();
    let chained = setting.path("chained.qcow2").display().to_string();
    let made = |arguments: &[&str]| {
        let output = Command::new("qemu-img").args(arguments).output().unwrap();
        assert!(output.status.success(), "{output:?}");
    };
    made(&["convert", "-O", "qcow2", &raw, &qcow2]);
    made(&[
        "create", "-f", "qcow2", "-F", "qcow2", "-b", &qcow2, &chained,
    ]);
    let id = |file: &str| setting.json(&["import", file])["id"].clone();
    assert_eq!(id(&raw), id(&qcow2));
    setting.check("import_chained", &["import", &chained]);
    setting.check("import_no_qcow2", &["import", "--format", "qcow2", &raw]);
}

#[test]
fn what_cannot_be_imported_is_refused_with_what_to_do() {
    let setting = Setting::new();
    let disk = setting.disk("disk.vmdk", "one");
    let path = disk.display().to_string();
    setting.check("import_format", &["import", &path]);
    setting.check("import_missing", &["import", "/nonexistent/disk.raw"]);
    let folder = setting.folder.path().display().to_string();
    setting.check("import_folder", &["import", "--format", "raw", &folder]);
    setting.check("import_name", &["import", &path, "--name", "../x"]);
    let file = File::options().read(true).write(true).open(&disk).unwrap();
    let _guest = ImageLock::alone(&file, ImageUse::Raw).unwrap();
    setting.check("import_in_use", &["import", "--format", "raw", &path]);
    assert!(!setting.path("state").exists());
}
