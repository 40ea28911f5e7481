//! What the build script decides and reads, with no GPU and a stand-in for nvcc.
#![cfg(unix)]

#[path = "../kernels/build/architecture.rs"]
mod architecture;
#[path = "../kernels/build/compiler.rs"]
mod compiler;
#[path = "../kernels/build/resources.rs"]
mod resources;
#[path = "../kernels/build/unit.rs"]
mod unit;

use architecture::{options, parse_architectures, DEFAULT_ARCHITECTURES};
use compiler::{compile_all, nvcc_candidates, parse_version, times, Compiled, Nvcc};
use resources::{check_local_memory, table, usages, warnings, Usage};
use std::collections::HashSet;
use std::ffi::OsString;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use unit::{list, sources, units, Unit};

/// From nvcc 13.0: a kernel that calls a function which is not part of it, and one with a warning.
const LOG: &str = "\
kernels/attend.cu(5): warning #177-D: variable \"unused\" was declared but never referenced
    float s[64]; int unused;
                     ^

Remark: The warnings can be suppressed with \"-diag-suppress <warning-number>\"

ptxas info    : 24 bytes gmem, 8 bytes cmem[4]
ptxas info    : Compiling entry function 'attend_forward_dot_w64_v1_bf16' for 'sm_80'
ptxas info    : Function properties for attend_forward_dot_w64_v1_bf16
    192 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 192 bytes cumulative stack size, 372 bytes cmem[0], 8 bytes cmem[2]
ptxas info    : Compile time = 70.755 ms
ptxas info    : Function properties for _Z6calledPfi
    16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
ptxas info    : Compiling entry function 'attend_forward_dot_w64_v1_f16' for 'sm_90a'
ptxas info    : Function properties for attend_forward_dot_w64_v1_f16
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 256 bytes smem
ptxas info    : Compile time = 2.916 ms
";

fn usage(kernel: &str, architecture: &str) -> Usage {
    Usage {
        kernel: kernel.into(),
        architecture: architecture.into(),
        ..Usage::default()
    }
}

#[test]
fn report_of_two_kernels_is_read() {
    let bf16 = Usage {
        registers: 32,
        stack: 192 + 16,
        spill_stores: 8,
        spill_loads: 12,
        ..usage("attend_forward_dot_w64_v1_bf16", "sm_80")
    };
    let f16 = Usage {
        registers: 168,
        shared: 256,
        ..usage("attend_forward_dot_w64_v1_f16", "sm_90a")
    };
    assert_eq!(usages(LOG), [bf16, f16]);
    assert_eq!(usages("nothing of the kind"), []);
}

#[test]
fn report_without_warnings_says_nothing_else() {
    let said = warnings(LOG);
    assert_eq!(said.len(), 2, "{said:?}");
    assert!(said[0].starts_with("kernels/attend.cu(5): warning #177-D"));
    assert_eq!(said[0].lines().count(), 3);
    assert!(said[1].contains("wgmma.mma_async instructions are serialized"));
    let report: String = LOG
        .lines()
        .skip(6)
        .filter(|line| !line.contains("Loss"))
        .collect();
    assert_eq!(warnings(&report), Vec::<String>::new());
}

#[test]
fn kernel_with_local_memory_is_refused_unless_it_may() {
    let refused = check_local_memory(&usages(LOG)).unwrap_err();
    for part in [
        "attend_forward_dot_w64_v1_bf16",
        "sm_80",
        "208 bytes",
        "8 of",
        "12 of",
    ] {
        assert!(refused.contains(part), "no {part:?} in: {refused}");
    }
    assert!(!refused.contains("_f16"), "{refused}");
    let slow = Usage {
        stack: 8,
        ..usage("attend_simt_phase_f64", "sm_80")
    };
    assert_eq!(check_local_memory(&[slow]), Ok(Vec::new()));
    let elsewhere = Usage {
        stack: 8,
        ..usage("attend_forward_dot_w64_v1_f16", "sm_120")
    };
    let told = check_local_memory(&[elsewhere]).unwrap();
    assert!(
        told.len() == 1 && told[0].contains("sm_120: 8 bytes"),
        "{told:?}"
    );
    for kernel in ["attend_forward_simt", "attend_decode_bias_w64_v1_f16"] {
        for (stack, spill_stores, spill_loads) in [(1, 0, 0), (0, 1, 0), (0, 0, 1)] {
            let usage = Usage {
                stack,
                spill_stores,
                spill_loads,
                ..usage(kernel, "sm_90")
            };
            assert!(check_local_memory(&[usage]).is_err(), "{kernel}");
        }
    }
}

#[test]
fn table_has_a_line_a_kernel() {
    let table = table(&usages(LOG));
    let lines: Vec<Vec<_>> = table
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert_eq!(lines.len(), 3);
    assert_eq!(
        lines[1],
        [
            "attend_forward_dot_w64_v1_bf16",
            "sm_80",
            "32",
            "208",
            "8",
            "12",
            "0"
        ]
    );
    assert_eq!(
        lines[2],
        [
            "attend_forward_dot_w64_v1_f16",
            "sm_90a",
            "168",
            "0",
            "0",
            "0",
            "256"
        ]
    );
}

#[test]
fn list_of_architectures_is_read_once_each() {
    let read = |list: &str| -> Vec<String> {
        let read = parse_architectures(list).unwrap();
        read.iter().map(ToString::to_string).collect()
    };
    assert_eq!(
        read(DEFAULT_ARCHITECTURES),
        ["sm_80", "sm_90", "compute_80"]
    );
    assert_eq!(
        read(" sm_90a , sm_90a,,compute_120f"),
        ["sm_90a", "compute_120f"]
    );
}

#[test]
fn architecture_that_is_none_is_refused_by_name() {
    for (list, part) in [
        ("", "sm_80,sm_90,compute_80"),
        (" , ", "no architecture"),
        ("90", "\"90\""),
        ("sm90", "\"sm90\""),
        ("sm_", "\"sm_\""),
        ("sm_80,sm_9o", "\"sm_9o\""),
        ("sm_90aa", "\"sm_90aa\""),
        ("sm_+90", "\"sm_+90\""),
        ("SM_90", "\"SM_90\""),
        ("sm_99999999999", "\"sm_99999999999\""),
        ("sm_80 sm_90", "\"sm_80 sm_90\""),
        ("sm_75", "at least 80"),
        ("compute_70", "at least 80"),
    ] {
        let error = parse_architectures(list).unwrap_err();
        assert!(error.contains(part), "{list:?}: {error}");
    }
}

#[test]
fn images_of_the_same_ptx_share_an_option() {
    let read = |list: &str| options(&parse_architectures(list).unwrap());
    assert_eq!(
        read(DEFAULT_ARCHITECTURES),
        ["-gencode=arch=compute_80,code=[sm_80,sm_90,compute_80]"]
    );
    assert_eq!(
        read("sm_90a,sm_90,compute_120,sm_89,compute_90a"),
        [
            "-gencode=arch=compute_90a,code=[sm_90a,compute_90a]",
            "-gencode=arch=compute_89,code=[sm_90,sm_89]",
            "-gencode=arch=compute_120,code=[compute_120]",
        ]
    );
}

#[test]
fn nvcc_is_looked_for_where_variables_say_first() {
    let places = |set: &[(&str, &str)]| -> Vec<String> {
        let find = |name: &str| {
            let value = set.iter().find(|(key, _)| *key == name);
            value.map(|(_, value)| OsString::from(value))
        };
        let found = nvcc_candidates(find);
        found
            .iter()
            .map(|(_, path)| path.display().to_string())
            .collect()
    };
    let usual = "/usr/local/cuda/bin/nvcc";
    assert_eq!(places(&[]), [usual]);
    assert_eq!(
        places(&[
            ("PATH", "/c/bin:/d"),
            ("CUDA_PATH", "/b"),
            ("CUDA_HOME", "/a")
        ]),
        [
            "/a/bin/nvcc",
            "/b/bin/nvcc",
            "/c/bin/nvcc",
            "/d/nvcc",
            usual
        ]
    );
    // An empty variable is none.
    assert_eq!(places(&[("CUDA_HOME", ""), ("NVCC", "")]), [usual]);
    // What is asked for by name is not replaced by another.
    assert_eq!(
        places(&[("NVCC", "/x/nvcc"), ("CUDA_HOME", "/a"), ("PATH", "/bin")]),
        ["/x/nvcc"]
    );
    assert_eq!(
        places(&[("NVCC", "nvcc-13"), ("CUDA_HOME", "/a"), ("PATH", "/bin")]),
        ["/bin/nvcc-13"]
    );
}

#[test]
fn release_of_nvcc_is_read_from_its_banner() {
    let banner =
        "nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release 13.0, V13.0.88\n";
    assert_eq!(parse_version(banner), Some((13, 0)));
    assert_eq!(parse_version("release 12.10, V"), Some((12, 10)));
    assert_eq!(parse_version("release x"), None);
    assert_eq!(parse_version(""), None);
}

#[test]
fn units_have_names_of_their_own_and_the_macros_of_their_tile() {
    let units = units();
    let names: HashSet<_> = units.iter().map(|unit| unit.name.as_str()).collect();
    assert_eq!(names.len(), units.len());
    let unit = |name: &str| units.iter().find(|unit| unit.name == name).unwrap();
    let forward = unit("attend_forward_phase_precise_w128_v1");
    assert_eq!(forward.source, "attend_forward.cu");
    assert_eq!(
        forward.macros[..3],
        [
            "SCORE_PHASE_PRECISE=1",
            "KERNEL_WIDTH=128",
            "KERNEL_VALUES=1"
        ]
    );
    let named: Vec<_> = forward
        .macros
        .iter()
        .map(|pair| pair.split('=').next().unwrap())
        .collect();
    assert_eq!(
        named[3..],
        [
            "KERNEL_WARPS",
            "KERNEL_ROW_TILES",
            "KERNEL_KEYS",
            "KERNEL_BLOCKS"
        ]
    );
    let decode = unit("attend_decode_dot_w64_v2");
    assert_eq!(decode.source, "attend_decode.cu");
    assert_eq!(
        decode.macros[..3],
        ["SCORE_DOT=1", "KERNEL_WIDTH=64", "KERNEL_VALUES=2"]
    );
    let backward = unit("attend_backward_bias_w256_v1");
    assert_eq!(backward.source, "attend_backward.cu");
    assert_eq!(
        backward.macros[..3],
        ["SCORE_BIAS=1", "KERNEL_WIDTH=256", "KERNEL_VALUES=1"]
    );
    for name in ["attend_simt", "attend_simt_backward"] {
        let simt = unit(&format!("{name}_phase"));
        assert_eq!(simt.source, format!("{name}.cu"));
        assert_eq!(simt.macros, ["SCORE_PHASE=1"]);
    }
    let delta = unit("attend_simt_delta");
    assert_eq!(delta.source, "attend_simt_delta.cu");
    assert!(delta.macros.is_empty());
}

#[test]
fn list_of_fatbins_is_in_order_of_names() {
    let images = parse_architectures("sm_90a,compute_80").unwrap();
    let text = list(&[plain("b"), plain("a")], &images);
    assert!(text.contains("(true, 90, \"a\")") && text.contains("(false, 80, \"\")"));
    let a = text
        .find("(\"a\", include_bytes!(concat!(env!(\"OUT_DIR\"), \"/a.fatbin\")))")
        .unwrap();
    let b = text.find("(\"b\", include_bytes!").unwrap();
    assert!(a < b && text.contains("pub const KERNELS: &[(&str, &[u8])]"));
}

#[test]
fn sources_of_a_unit_are_all_that_it_includes() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
    write(
        "a.cu",
        "#include <cuda_bf16.h>\n  # include \"b.cuh\"\nint x;\n#include \"c.cuh\" // why\n",
    );
    write("b.cuh", "#include \"c.cuh\"\n#include \"b.cuh\"\n");
    write("c.cuh", "// #include is a word\n");
    write("d.cuh", "");
    let found = sources(folder.path(), "a.cu").unwrap();
    let found: Vec<_> = found.iter().map(|path| path.file_name().unwrap()).collect();
    assert_eq!(found, ["a.cu", "b.cuh", "c.cuh"]);
    write("c.cuh", "#include \"missing.cuh\"\n");
    let error = sources(folder.path(), "a.cu").unwrap_err();
    assert!(
        error.contains("a.cu") && error.contains("missing.cuh"),
        "{error}"
    );
}

#[test]
fn record_of_other_inputs_is_not_read() {
    let compiled = Compiled {
        seconds: 2.5,
        log: LOG.into(),
    };
    let text = compiled.text("abc");
    assert_eq!(Compiled::read(&text, "abc"), Some(compiled));
    assert_eq!(Compiled::read(&text, "abd"), None);
    assert_eq!(Compiled::read("", "abc"), None);
    assert_eq!(Compiled::read("abc", "abc"), None);
}

fn plain(name: &str) -> Unit {
    Unit {
        name: name.into(),
        source: "kernel.cu",
        macros: vec![format!("NAME={name}")],
    }
}

/// A folder with a program that does as nvcc does, and notes the units it was given.
struct Workshop {
    folder: tempfile::TempDir,
}

impl Workshop {
    fn new(release: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let nvcc = format!(
            "#!/bin/sh
case \"$1\" in
--version) echo 'Cuda compilation tools, release {release}, V'; exit 0;;
--list-gpu-arch) printf 'compute_80\\ncompute_90\\n'; exit 0;;
--help) echo '--compress-mode [default,size]'; exit 0;;
esac
here=$(dirname \"$0\")
for argument; do
    case \"$argument\" in -DNAME=*) name=${{argument#-DNAME=}};; --compress-mode=size) size=1;; esac
    [ \"$before\" != -o ] || out=$argument
    before=$argument
done
echo \"$name\" >> \"$here/compiled\"
[ -n \"$size\" ] || {{ echo 'ptxas fatal : no size'; exit 2; }}
grep -q broken \"$before\" && {{ echo 'kernel.cu(1): error: broken' >&2; exit 1; }}
echo fatbin > \"$out\"
echo \"ptxas info    : Compiling entry function '${{name}}_bf16' for 'sm_80'\" >&2
"
        );
        // By another process: a file that this one wrote cannot be run while a test beside this one forks.
        let path = folder.path().join("nvcc");
        let mut writer = Command::new("sh")
            .args(["-c", "cat > \"$0\" && chmod +x \"$0\""])
            .arg(&path)
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        let mut text = writer.stdin.take().unwrap();
        text.write_all(nvcc.as_bytes()).unwrap();
        drop(text);
        assert!(writer.wait().unwrap().success());
        fs::write(folder.path().join("kernel.cu"), "").unwrap();
        Self { folder }
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    fn candidates(&self) -> Vec<(String, PathBuf)> {
        vec![
            ("PATH".into(), "/nowhere/nvcc".into()),
            ("NVCC".into(), self.path().join("nvcc")),
        ]
    }

    fn compile(&self, list: &str, units: &[Unit]) -> Result<Vec<Compiled>, String> {
        let nvcc = Nvcc::find(&self.candidates(), &parse_architectures(list)?)?;
        compile_all(&nvcc, units, self.path(), self.path(), Some(2))
    }

    /// The units compiled since the last call, sorted.
    fn compiled(&self) -> Vec<String> {
        let path = self.path().join("compiled");
        let text = fs::read_to_string(&path).unwrap_or_default();
        let _ = fs::remove_file(path);
        let mut names: Vec<_> = text.lines().map(String::from).collect();
        names.sort();
        names
    }
}

#[test]
fn unit_that_did_not_change_is_not_compiled_again() {
    let shop = Workshop::new("13.0");
    let units = ["a", "b", "c"].map(plain);
    let first = shop.compile("sm_80", &units).unwrap();
    assert_eq!(shop.compiled(), ["a", "b", "c"]);
    let kernels: Vec<_> = first
        .iter()
        .flat_map(|unit| usages(&unit.log))
        .map(|usage| usage.kernel)
        .collect();
    assert_eq!(kernels, ["a_bf16", "b_bf16", "c_bf16"]);

    let again = shop.compile("sm_80", &units).unwrap();
    assert_eq!(shop.compiled(), Vec::<String>::new());
    let logs = |made: &[Compiled]| made.iter().map(|unit| unit.log.clone()).collect::<Vec<_>>();
    assert_eq!(logs(&again), logs(&first));

    let mut other = units.clone();
    other[1].macros.push("WIDTH=64".into());
    shop.compile("sm_80", &other).unwrap();
    assert_eq!(shop.compiled(), ["b"]);
    shop.compile("sm_80,compute_80", &other).unwrap();
    assert_eq!(shop.compiled(), ["a", "b", "c"]);
    fs::remove_file(shop.path().join("c.fatbin")).unwrap();
    shop.compile("sm_80,compute_80", &other).unwrap();
    assert_eq!(shop.compiled(), ["c"]);
    fs::write(shop.path().join("kernel.cu"), "// other").unwrap();
    shop.compile("sm_80,compute_80", &other).unwrap();
    assert_eq!(shop.compiled(), ["a", "b", "c"]);
}

#[test]
fn unit_that_does_not_compile_is_told_and_compiled_again() {
    let shop = Workshop::new("13.0");
    let units = [plain("a")];
    shop.compile("sm_80", &units).unwrap();
    fs::write(shop.path().join("kernel.cu"), "broken").unwrap();
    for _ in 0..2 {
        let error = shop.compile("sm_80", &units).unwrap_err();
        assert!(
            error.contains("a does not compile") && error.contains("error: broken"),
            "{error}"
        );
    }
    assert_eq!(shop.compiled(), ["a", "a", "a"]);
    // What the failed runs left in place of the fatbin is not taken for the one of these sources.
    fs::write(shop.path().join("kernel.cu"), "").unwrap();
    shop.compile("sm_80", &units).unwrap();
    assert_eq!(shop.compiled(), ["a"]);
}

#[test]
fn nvcc_that_is_missing_old_or_without_an_architecture_is_told() {
    let both = parse_architectures("sm_90a,compute_80").unwrap();
    let find = |candidates: &[(String, PathBuf)]| Nvcc::find(candidates, &both).err();
    let missing = find(&[("CUDA_HOME".into(), "/nowhere/bin/nvcc".into())]).unwrap();
    for part in [
        "/nowhere/bin/nvcc (CUDA_HOME)",
        "kernels/toolkit.sh",
        "without the feature",
    ] {
        assert!(missing.contains(part), "no {part:?} in: {missing}");
    }
    let old = find(&Workshop::new("11.8").candidates()).unwrap();
    assert!(
        old.contains("11.8") && old.contains("12.0 or newer"),
        "{old}"
    );
    let odd = find(&Workshop::new("soon").candidates()).unwrap();
    assert!(odd.contains("unknown release"), "{odd}");
    let shop = Workshop::new("12.0");
    assert_eq!(find(&shop.candidates()), None);
    let error = shop.compile("sm_100", &[]).unwrap_err();
    assert!(
        error.contains("sm_100") && error.contains("compute_90"),
        "{error}"
    );
}

#[test]
fn times_are_told_slowest_first() {
    let made = |seconds| Compiled {
        seconds,
        log: String::new(),
    };
    let text = times(&[plain("quick"), plain("slow")], &[made(1.), made(2.5)]);
    let rows: Vec<Vec<_>> = text
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert_eq!(
        rows,
        [
            ["unit", "seconds"],
            ["all", "3.5"],
            ["slow", "2.5"],
            ["quick", "1.0"]
        ]
    );
}
